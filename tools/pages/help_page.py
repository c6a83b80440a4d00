"""The help page of one family node: web/docs/<node id>/<language>.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tools.pages.facts import Facts
from tools.pages.sources import Json


def help_page(facts: Facts, kind: str, node: Json, templates: Sequence[str]) -> str:
    """`node`: its schema. `templates`: the example workflows that have the node."""
    return "\n".join(_HelpPage(facts, kind, node).lines(templates)) + "\n"


class _HelpPage:
    def __init__(self, facts: Facts, kind: str, node: Json) -> None:
        self.facts, self.node = facts, node
        self.form = facts.help["format"]
        own = facts.help["node_sets"].get(facts.nodes.key, {})
        self.sources = [
            {"inputs": facts.help["inputs"]},
            facts.help["kinds"][kind],
            {"inputs": own.get("inputs", {})},
            own.get("kinds", {}).get(kind, {}),
        ]
        """Hand-written texts, from the most general."""

    def lines(self, templates: Sequence[str]) -> Iterator[str]:
        definition, headings = self.facts.definition(self.node["id"]), self.form["headings"]
        yield f"# {definition['display_name']}"
        yield from ("", self.join_sentences(definition["description"], *self.notes("introduction")))
        yield from ("", f"## {headings['inputs']}", "")
        yield from map(self.input_row, self.node["inputs"])
        yield from ("", f"## {headings['outputs']}", "")
        yield from (self.output_row(str(number), each) for number, each in enumerate(self.node["outputs"]))
        if remarks := self.notes("remarks"):
            yield from ("", self.join_sentences(*remarks))
        yield from (
            "",
            f"## {headings['example']}",
            "",
            self.join_sentences(*self.notes("example"), self.templates(templates)),
        )
        yield from ("", f"## {headings['errors']}", "")
        yield from self.errors()

    def notes(self, *keys: str) -> list[str]:
        """The notes at these keys of all sources whose conditions hold, with their placeholders replaced."""
        found: list[str] = []
        for source in self.sources:
            value: Any = source
            for key in keys:
                value = value.get(key, {})
            found += [self.facts.fill(note["text"]) for note in value or [] if self.facts.holds(note.get("when", []))]
        return found

    def join_sentences(self, *sentences: str) -> str:
        return str(self.form["sentence_space"]).join(sentence for sentence in sentences if sentence)

    def input_row(self, given: Json) -> str:
        name = given["id"]
        text = self.facts.text_of(self.node["id"], "inputs", name)
        return self.facts.fill(
            self.form["input"],
            id=name,
            name=text["name"],
            kind=self.type_and_default(given),
            text=self.join_sentences(text["tooltip"], self.facts.by_model(name), *self.notes("inputs", name)),
        )

    def type_and_default(self, given: Json) -> str:
        """Type or range, and default."""
        optional = self.form["optional"] if given["optional"] else ""
        if given["type"] in ("INT", "FLOAT"):
            most = "2⁶⁴−1" if given["max"] == 2**64 - 1 else f"{given['max']:g}"
            steps = ""
            if given["type"] == "INT" and given.get("step", 1) > 1:
                is_length = given["id"] == "num_frames"
                steps = self.form["frames"] if is_length else self.form["steps"].format(step=given["step"])
            number = self.form["number"].format(
                min=f"{given['min']:g}", max=most, steps=self.facts.fill(steps), default=given["default"]
            )
            return f"{number}{optional}"
        if given["type"] == "COMBO" and given["id"] == "model_id":
            return str(self.form["model"]).format(default=given["default"]) + optional
        if given["type"] == "COMBO":
            options = self.form["list"].join(given["options"])
            return str(self.form["choice"]).format(options=options, default=given["default"]) + optional
        if given["type"] == "STRING":
            return str(self.form["may_be_empty" if given.get("default") == "" else "text"]) + optional
        return f"{given['type']}{optional}"

    def output_row(self, number: str, made: Json) -> str:
        text = self.facts.text_of(self.node["id"], "outputs", number)
        return self.facts.fill(
            self.form["output"],
            id=made["name"],
            name=text["name"],
            type=made["type"],
            text=self.join_sentences(text["tooltip"], *self.notes("outputs", made["name"])),
        )

    def templates(self, templates: Sequence[str]) -> str:
        bold = self.form["list"].join(f"**{template}**" for template in templates)
        return str(self.form["templates"]).format(list=bold) if templates else ""

    def errors(self) -> Iterator[str]:
        errors = self.facts.help["errors"]
        for name in (name for source in self.sources for name in source.get("errors", [])):
            if self.facts.holds(errors[name].get("when", [])):
                message, meaning = (self.facts.fill(errors[name][part]) for part in ("message", "meaning"))
                yield self.form["error"].format(message=message, meaning=meaning)
