"""A scaffold as text and as JSON: rules with what they divide, stacks, what was learned, files.

The keys of the JSON stay; new ones may be added:

    name, pipeline, model_id   of the family
    checks                     target, verdict, why
    stacks, rules              path and carry; kind, pattern and bytes
    learned                    what was found of the pipeline, by name
    unexplained                one sentence each
    files                      what was written, or with --dry-run would be
    tested                     whether the parity test passed; null: it did not run
    seconds_to_a_frame         from the command's start to the first decoded frame; null: none was
    undo                       the command that removes what was written; null: nothing was
    directory                  what the paths of `files` are relative to
    package                    the family's importable package
"""

from __future__ import annotations

from typing import Any

from comfy_tpu.porting.scaffold.facts import Facts
from comfy_tpu.porting.scaffold.new import Scaffold

_GIB = 2**30


def format_lines(scaffold: Scaffold) -> list[str]:
    facts = scaffold.facts
    lines = [f"{facts.title}: {facts.source.name}, {facts.model_id}", ""]
    lines += [f"  {check.target.name}: {check.verdict}: {check.why}" for check in scaffold.checks]
    lines += ["", "How the pipeline calls its parts, by two runs of a small one:"]
    lines += [f"  {name:<12} {text}" for name, text in _describe_calls(facts).items()]
    lines += ["", "Lists of blocks that run as one scanned layer:"]
    lines += [f"  {stack.path}, carrying {', '.join(stack.carry)}" for stack in facts.proposal.stacks] or ["  none"]
    lines += [f"  not {text}" for text in facts.proposal.unstacked]
    lines += ["", "Sharding rules, with what each divides at the published size in bfloat16:"]
    width = max(len(str(rule)) for rule in facts.proposal.rules)
    for rule in facts.proposal.rules:
        lines.append(f"  {rule!s:<{width}}  {facts.proposal.nbytes[rule.pattern] / _GIB:8.3f} GiB")
    split = sum(facts.proposal.nbytes[rule.pattern] for rule in facts.proposal.rules if rule.kind != "replicate")
    total = sum(facts.proposal.nbytes.values())
    lines.append(f"  {split / _GIB:.2f} of {total / _GIB:.2f} GiB lie in pieces.")
    if facts.calls.unexplained:
        lines += ["", "What nothing explained, and the family's file does not do:"]
        lines += [f"  {sentence}" for sentence in facts.calls.unexplained]
    return lines


def _describe_calls(facts: Facts) -> dict[str, str]:
    calls = facts.calls
    frames = "" if calls.makes_images else f", {calls.temporal_scale} frames"
    return {
        "prompt": calls.prompt_cleanup,
        **{each.name: f"{each.encoder}: {each.output.expression}" for each in calls.embeddings},
        **{f"{name}=": text for name, text in calls.arguments.items()},
        "velocity": calls.velocity,
        "scheduler": calls.scheduler or f"{facts.source.parts['scheduler'].__name__} with its own timesteps",
        "latents": f"{calls.layout.name}, {calls.spatial_scale} pixels a side{frames}",
        "VAE": f"{calls.vae_layout.expression}, mean and deviation {calls.latent_statistics}",
    }


def make_document(scaffold: Scaffold) -> dict[str, Any]:
    facts = scaffold.facts
    return {
        "schema": 1,
        "name": facts.name,
        "pipeline": facts.source.name,
        "model_id": facts.model_id,
        "blocked": scaffold.blocked,
        "checks": [
            {"target": check.target.name, "verdict": check.verdict, "why": check.why} for check in scaffold.checks
        ],
        "stacks": [{"path": stack.path, "carry": list(stack.carry)} for stack in facts.proposal.stacks],
        "rules": [
            {"kind": rule.kind, "pattern": rule.pattern, "bytes": facts.proposal.nbytes[rule.pattern]}
            for rule in facts.proposal.rules
        ],
        "learned": _describe_calls(facts),
        "unexplained": list(facts.calls.unexplained),
        "directory": str(scaffold.destination.root),
        "package": facts.package,
        "files": list(scaffold.files),
    }
