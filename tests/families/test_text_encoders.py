"""Text encoders that families share, against transformers' own. Those of one family are in its own tests."""

import pytest
import torch
from transformers import T5Config, T5EncoderModel

from comfy_tpu.families.shared.text_encoders import encode_t5, t5_component, zero_padding

CONFIG = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
IDS = torch.tensor([[5, 6, 7, 1, 0, 0], [8, 1, 0, 0, 0, 0]])
MASK = (IDS != 0).int()


@pytest.mark.parametrize("mask", [None, MASK], ids=["unmasked", "masked"])
def test_t5_with_and_without_a_mask(mask: torch.Tensor | None) -> None:
    torch.manual_seed(0)
    reference = T5EncoderModel(T5Config(**CONFIG)).eval()
    module = t5_component("text_encoder").build(CONFIG).eval()
    weights = reference.state_dict()
    rename = t5_component("text_encoder").rename
    assert rename is not None
    module.load_state_dict({rename(name): weight for name, weight in weights.items()}, strict=False)
    with torch.no_grad():
        found, wanted = encode_t5(module, IDS, mask), reference(IDS, mask)[0]
        other = encode_t5(module, IDS, MASK if mask is None else None)
    torch.testing.assert_close(found, wanted)
    assert (found - other).abs().max() > 1e-3, "a mask is seen"


def test_nothing_is_left_of_the_filling() -> None:
    kept = zero_padding(torch.ones(2, 6, 3), MASK)
    assert torch.equal(kept.sum((1, 2)), torch.tensor([12.0, 6.0]))
