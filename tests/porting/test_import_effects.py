"""What a file does when it is imported: CUDA and NCCL, read without an import and with one that fails."""

from comfy_tpu.porting.check import check
from comfy_tpu.porting.targets import find_targets

ON_IMPORT = """
import torch
import torch.distributed as dist

torch.cuda.set_device(0)
dist.init_process_group("nccl")
TABLE = torch.arange(8, device="cuda")
if torch.cuda.is_available():
    torch.cuda.set_device(1)


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2
"""


def test_cuda_and_nccl_that_an_import_starts(tmp_path):
    path = tmp_path / "starts_cuda.py"
    path.write_text(ON_IMPORT)
    (target,) = find_targets(f"{path}:Model")
    expected = [("cuda", 5), ("distributed", 6), ("cuda", 7)]
    done = check(target, static=True)
    assert [(finding.trap, finding.line) for finding in done.findings] == expected
    assert done.why == f"3 lines stop the trace, the first is {path}:5"
    done = check(target, inputs={"x": [2, 3]})
    assert [(finding.trap, finding.line) for finding in done.findings] == expected
    assert done.verdict == "will not run"
    assert "no small model was tried" in done.why
    assert "cannot be imported (" in done.why
