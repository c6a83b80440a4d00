"""Names of torch that reading the source must know: what makes tensors, what only describes them, what is a trap."""

from __future__ import annotations

TENSOR_ATTRIBUTES = frozenset(["T", "mT", "H", "mH", "real", "imag", "data", "values", "indices"])
"""Of tensors, those that are tensors; all others only describe one."""
DESCRIBING_METHODS = frozenset(
    [
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "element_size",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "get_device",
        "storage_offset",
        "data_ptr",
        "type",
        "has_names",
        "is_inference",
    ]
)
DESCRIBING_FUNCTIONS = frozenset(
    [
        "torch.is_tensor",
        "torch.is_floating_point",
        "torch.is_complex",
        "torch.numel",
        "torch.finfo",
        "torch.iinfo",
        "torch.device",
        "torch.get_default_dtype",
        "torch.broadcast_shapes",
        "torch.is_grad_enabled",
        "torch.Size",
        "torch.autocast",
        "torch.no_grad",
        "torch.Generator",
        "torch.get_autocast_dtype",
        "torch.is_autocast_enabled",
        "torch.promote_types",
        "torch.result_type",
    ]
)
SEVERAL = frozenset(
    [
        "chunk",
        "split",
        "unbind",
        "tensor_split",
        "topk",
        "sort",
        "kthvalue",
        "aminmax",
        "var_mean",
        "std_mean",
        "meshgrid",
    ]
)
"""Methods and functions that return several tensors."""
MAKING = frozenset(
    [
        "arange",
        "empty",
        "eye",
        "full",
        "hann_window",
        "linspace",
        "logspace",
        "ones",
        "tensor",
        "tril_indices",
        "triu_indices",
        "zeros",
        "as_tensor",
        "from_numpy",
    ]
)
MAKING_LIKE = frozenset(["new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"])
SIZED = frozenset(["arange", "empty", "full", "linspace", "ones", "zeros"])
"""Of those that make tensors, the ones that need numbers."""
COMPARING = frozenset(
    [
        "eq",
        "ne",
        "gt",
        "ge",
        "lt",
        "le",
        "isnan",
        "isinf",
        "isfinite",
        "logical_and",
        "logical_or",
        "logical_not",
        "logical_xor",
        "bool",
        "isclose",
        "isin",
    ]
)
AS_NUMBERS = frozenset(["item", "tolist", "numpy", "__bool__", "__int__", "__float__"])
NUMBERS_OF = frozenset(
    [
        "numpy.array",
        "numpy.asarray",
        "int",
        "float",
        "bool",
        "range",
        "max",
        "min",
        "round",
        "math.sqrt",
        "math.log",
        "math.log2",
        "math.exp",
        "math.ceil",
        "math.floor",
        "math.cos",
        "math.sin",
        "math.pow",
    ]
)
DECIDING = frozenset(["equal", "allclose"])
"""Functions of tensors that answer with a Python bool."""
SHAPED_BY_DATA = frozenset(["nonzero", "unique", "unique_consecutive", "masked_select", "argwhere", "bincount"])
RANDOM = frozenset(
    [
        "bernoulli",
        "multinomial",
        "normal",
        "poisson",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "randperm",
    ]
)
RANDOM_METHODS = frozenset(
    [
        "bernoulli",
        "bernoulli_",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "multinomial",
        "normal_",
        "random_",
        "uniform_",
    ]
)
RANDOM_INITIAL = frozenset(
    [
        "kaiming_normal_",
        "kaiming_uniform_",
        "normal_",
        "orthogonal_",
        "trunc_normal_",
        "uniform_",
        "xavier_normal_",
        "xavier_uniform_",
    ]
)
"""Of torch.nn.init."""
GENERATORS = frozenset(
    ["numpy.random.default_rng", "numpy.random.Generator", "numpy.random.RandomState", "random.Random"]
)
COMPLEX = frozenset(["complex", "polar", "view_as_complex", "stft", "istft"])
COMPLEX_METHODS = frozenset(["cfloat", "cdouble", "view_as_complex"])
FLOAT64 = frozenset(["torch.float64", "torch.double", "torch.complex128", "torch.cdouble"])
COMPLEX_DTYPES = frozenset(["torch.complex32", "torch.complex64", "torch.cfloat", "torch.chalf"])
QUIET_CUDA = frozenset(
    [
        "amp",
        "device_count",
        "empty_cache",
        "ipc_collect",
        "is_available",
        "is_initialized",
        "max_memory_allocated",
        "max_memory_reserved",
        "memory_allocated",
        "memory_reserved",
        "reset_peak_memory_stats",
    ]
)
"""Parts of torch.cuda that answer, or do nothing, where there is no GPU."""
QUIET_DISTRIBUTED = frozenset(
    ["is_available", "is_initialized", "is_nccl_available", "is_gloo_available", "ReduceOp", "Backend"]
)
GPU_LIBRARIES = frozenset(
    [
        "apex",
        "bitsandbytes",
        "deepspeed",
        "flash_attn",
        "flash_attn_3",
        "flash_attn_interface",
        "flashinfer",
        "hopper_attn",
        "liger_kernel",
        "sageattention",
        "spas_sage_attn",
        "torch_npu",
        "transformer_engine",
        "triton",
        "xformers",
        "xfuser",
    ]
)
FALSE_HERE = frozenset(
    [
        "torch.cuda.is_available",
        "torch.distributed.is_initialized",
        "torch.distributed.is_available",
        "torch.is_grad_enabled",
        "torch.jit.is_scripting",
        "torch.jit.is_tracing",
        "torch.compiler.is_compiling",
        "torch.onnx.is_in_onnx_export",
        "torch.backends.mps.is_available",
        "torch.is_autocast_enabled",
        "typing.TYPE_CHECKING",
    ]
)
"""At inference on a machine with TPUs."""
FALSE_ATTRIBUTES = frozenset(["training", "gradient_checkpointing", "is_cuda"])
PROPERTIES = frozenset(["property", "cached_property"])
OTHER_DEVICES = frozenset(["cuda", "mps", "npu", "hpu"])
