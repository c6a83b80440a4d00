import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from comfy_tpu.config import MeshSizes, ShardingConfig
from comfy_tpu.errors import ShardingError
from comfy_tpu.parallel.mesh import abstract_placement, make_placement
from comfy_tpu.parallel.rules import column, covers, gather, plan_shardings, replicate, row


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


RULES = [
    column("blocks.*.to_q.weight"),
    column("blocks.*.to_q.bias"),
    row("blocks.*.to_out.weight"),
    replicate("blocks.*.to_out.bias"),
    gather("embed.*"),
]
WEIGHTS = {
    "blocks.*.to_q.weight": struct(40, 512, 256),
    "blocks.*.to_q.bias": struct(40, 512),
    "blocks.*.to_out.weight": struct(40, 256, 512),
    "blocks.*.to_out.bias": struct(40, 256),
    "embed.weight": struct(768, 512),
    "embed.bias": struct(768),
}
STACKED = ["blocks.*.to_q.weight", "blocks.*.to_q.bias", "blocks.*.to_out.weight", "blocks.*.to_out.bias"]


def plan(mesh, rules=RULES, weights=WEIGHTS, stacked=STACKED, **options):
    return plan_shardings(rules, weights, make_placement(mesh), stacked, **options)


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        (
            "sp=2,tp=4",
            {
                "blocks.*.to_q.weight": (P(None, "tp", "sp"), P(None, "tp")),
                "blocks.*.to_q.bias": (P(None, "tp"), P(None, "tp")),
                "blocks.*.to_out.weight": (P(None, "sp", "tp"), P(None, None, "tp")),
                "blocks.*.to_out.bias": (P(), P()),
                "embed.weight": (P(("sp", "tp")), P()),
                "embed.bias": (P(), P()),
            },
        ),
        (
            "dp=2,tp=4",
            {
                "blocks.*.to_q.weight": (P(None, "tp"), P(None, "tp")),
                "blocks.*.to_q.bias": (P(None, "tp"), P(None, "tp")),
                "blocks.*.to_out.weight": (P(None, None, "tp"), P(None, None, "tp")),
                "blocks.*.to_out.bias": (P(), P()),
                "embed.weight": (P("tp"), P()),
                "embed.bias": (P(), P()),
            },
        ),
        (
            "sp=8",
            {
                "blocks.*.to_q.weight": (P(None, "sp"), P()),
                "blocks.*.to_q.bias": (P(), P()),
                "blocks.*.to_out.weight": (P(None, None, "sp"), P()),
                "blocks.*.to_out.bias": (P(), P()),
                "embed.weight": (P("sp"), P()),
                "embed.bias": (P(), P()),
            },
        ),
        ("single", {name: (P(), P()) for name in WEIGHTS}),
    ],
)
def test_specs(mesh, expected):
    result = plan(mesh)
    assert {name: (entry.storage, entry.compute) for name, entry in result.entries.items()} == expected
    for name, weight in WEIGHTS.items():
        result.storage(name).shard_shape(weight.shape)  # raises where a dimension does not divide
        assert result.compute(name).mesh == result.placement.mesh


def test_gather_prefers_the_largest_dimension_then_one_axis_alone():
    rules = [gather("*")]
    weights = {
        "wide": struct(64, 1024),
        "sp_only": struct(512 + 2, 129),  # 514 divides by sp=2, not by tp=4 nor by 8
        "tp_only_by_size": struct(516, 129),  # 516 divides by 2 and 4, not by 8: the larger axis saves more
        "neither": struct(257, 257),
    }
    result = plan("sp=2,tp=4", rules, weights, [])
    assert {name: entry.storage for name, entry in result.entries.items()} == {
        "wide": P(None, ("sp", "tp")),
        "sp_only": P("sp"),
        "tp_only_by_size": P("tp"),
        "neither": P(),
    }
    assert result.report().could_not_split == ("neither",)
    assert "could not be split (no dimension divides): neither" in str(result.report())


def test_small_weights_are_not_gathered():
    weights = {"w": struct(128, 128, dtype=jnp.float32), "v": struct(128, 127, dtype=jnp.float32)}
    result = plan("sp=8", [gather("*")], weights, [])
    assert result.entries["w"].storage == P("sp")
    assert result.entries["v"].storage == P()
    result = plan("sp=8", [gather("*")], weights, [], config=ShardingConfig(gather_min_bytes=0))
    assert result.entries["v"].storage == P("sp")


def test_layer_dimension_is_never_split():
    # 40 layers divide by 8, the layer's own dimensions do not.
    result = plan("sp=8", [gather("*")], {"blocks.*.w": struct(40, 257, 255)}, ["blocks.*.w"])
    assert result.entries["blocks.*.w"].storage == P()


def test_report_adds_up():
    report = plan("sp=2,tp=4").report()
    layer = 40 * 512 * 256 * 2
    assert (report.sharded.tensors, report.gathered.tensors, report.replicated.tensors) == (3, 1, 2)
    assert report.sharded.nbytes == 2 * layer + 40 * 512 * 2
    assert report.sharded.bytes_per_device == 2 * layer // 8 + 40 * 512 * 2 // 4
    assert report.gathered.bytes_per_device == 768 * 512 * 2 // 8
    assert report.replicated.bytes_per_device == report.replicated.nbytes == (40 * 256 + 768) * 2
    assert report.total.nbytes == sum(jnp.dtype(w.dtype).itemsize * w.size for w in WEIGHTS.values())
    data = json.loads(json.dumps(report.as_dict()))
    assert data["total"]["tensors"] == 6
    assert data["mesh"] == {"dp": 1, "sp": 2, "tp": 4}


def test_report_bytes_are_what_arrays_take():
    result = plan("sp=2,tp=4")
    arrays = [jax.device_put(jnp.zeros(w.shape, w.dtype), result.storage(name)) for name, w in WEIGHTS.items()]
    held = {sum(array.addressable_shards[i].data.nbytes for array in arrays) for i in range(8)}
    assert held == {result.report().total.bytes_per_device}


def test_report_reads():
    weights = {"a": struct(20_000, 25_000), "b": struct(10_000, 25_000)}
    assert str(plan("dp=2,tp=4", [column("a"), replicate("b")], weights, []).report()).splitlines() == [
        "mesh dp=2,sp=1,tp=4",
        "             tensors        GB  GB per device",
        "sharded            1     1.000          0.250  split while computing",
        "gathered           0     0.000          0.000  stored in pieces, whole while computing",
        "replicated         1     0.500          0.500  whole on every device",
        "total              2     1.500          0.750",
    ]


def test_works_on_an_abstract_mesh():
    placement = abstract_placement(MeshSizes(dp=2, tp=4), platform="tpu", chip="v6e")
    result = plan_shardings(RULES, WEIGHTS, placement, STACKED)
    assert result.storage("blocks.*.to_q.weight").shard_shape((40, 512, 256)) == (40, 128, 256)


def test_patterns_are_case_sensitive_and_span_dots():
    plan("tp=2", [column("Net*c")], {"Net.b.c": struct(4, 4)}, [])
    with pytest.raises(ShardingError, match=r"no rule matches Net\.b\.c"):
        plan("tp=2", [column("net*c")], {"Net.b.c": struct(4, 4)}, [])


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (RULES[:-1], r"no rule matches embed.weight, embed.bias; add a rule for each .*The rules are column\('blocks"),
        ([], r"no rule matches (\S+, ){5}and 1 more; .*The rules are none"),
        (
            [*RULES, replicate("embed.bias")],
            r"more than one rule matches embed.bias \(gather\('embed.\*'\) and replicate\('embed.bias'\)\); narrow",
        ),
        (
            [*RULES, row("norm.*")],
            r"rules that match no weight: row\('norm.\*'\); correct or remove them. Weights are blo",
        ),
    ],
)
def test_every_weight_matches_exactly_one_rule(rules, message):
    with pytest.raises(ShardingError, match=message):
        plan("tp=2", rules)


def test_all_matching_problems_are_told_at_once():
    with pytest.raises(ShardingError, match="(?s)no rule matches.*more than one rule.*match no weight"):
        plan("tp=2", [gather("embed.*"), gather("embed.b*"), row("x")])


def test_tp_that_does_not_divide():
    weights = {"blocks.*.attn1.to_q.weight": struct(40, 5120, 64)}
    with pytest.raises(ShardingError) as error:
        plan("tp=3", [column("*")], weights, weights)
    assert str(error.value) == (
        "blocks.*.attn1.to_q.weight: dimension 0 is 5120, not divisible by tp=3; "
        "choose tp from 1, 2, 4, 5, 8, 10, 16, 20, 32, 40, 64, ..."
    )


def test_tp_suggestions_suit_every_weight():
    weights = {"a": struct(12, 4), "b": struct(4, 18), **{f"c{i}": struct(24) for i in range(6)}}
    rules = [column("a"), row("b"), column("c*")]
    with pytest.raises(ShardingError) as error:
        plan("tp=5", rules, weights, [])
    assert str(error.value).startswith("a: dimension 0 is 12, not divisible by tp=5; b: dimension 1 is 18, not")
    assert str(error.value).endswith("; and 3 more; choose tp from 1, 2, 3, 6")


def test_wrong_rank():
    with pytest.raises(
        ShardingError, match=r"b: row\('b'\) splits dimension 1, but a layer's weight has shape \(8,\); use col"
    ):
        plan("tp=2", [row("b")], {"b": struct(8)}, [])
    with pytest.raises(
        ShardingError, match=r"splits dimension 0, but a layer's weight has shape \(\); use replicate for it"
    ):
        plan("tp=2", [column("b")], {"b": struct(8)}, ["b"])
    with pytest.raises(ShardingError, match="b: is said to be stacked but has no dimension"):
        plan("tp=2", [replicate("b")], {"b": struct()}, ["b"])


def test_stacked_and_plan_names_must_exist():
    with pytest.raises(ShardingError, match="stacked names that are not weights: nope; weights are blocks"):
        plan("tp=2", stacked=["nope"])
    with pytest.raises(ShardingError, match="no weight 'nope' in this plan; it has blocks"):
        plan("tp=2").storage("nope")


@pytest.mark.parametrize(
    ("shapes", "tp", "covered"),
    [
        ({"blocks.*.q.weight": (8, 6), "norm.weight": (6,)}, 4, True),
        ({"blocks.*.q.weight": (8, 6), "norm.weight": (6,)}, 3, False),  # eight columns
        ({"blocks.*.q.weight": (8, 6), "norm.bias": (6,)}, 1, False),  # nobody's
        ({"blocks.*.q.weight": (8, 6), "blocks.*.q.weight_scale": (8,)}, 2, True),
        ({"blocks.*.both.weight": (8, 6)}, 1, False),  # two rules'
    ],
)
def test_which_tables_cover_a_model(shapes, tp, covered):
    rules = (column("blocks.*.q.*"), row("blocks.*.both.*"), replicate("norm.weight"), replicate("*both.weight"))
    weights = {name: struct(*shape) for name, shape in shapes.items()}
    assert covers(rules, weights, tp) is covered
