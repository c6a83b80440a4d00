"""Names of torch and Python that the static reader knows, each table for one question about a call or an attribute."""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TENSOR_ATTRIBUTES = _names("T mT H mH real imag data values indices")
"""Attributes of a tensor that are tensors; all others only describe it."""
METADATA_FUNCTIONS = _names(
    "size dim ndimension numel nelement stride element_size is_contiguous is_floating_point is_complex get_device "
    "storage_offset data_ptr type has_names is_inference is_tensor finfo iinfo device get_default_dtype "
    "broadcast_shapes is_grad_enabled autocast no_grad get_autocast_dtype is_autocast_enabled promote_types result_type"
)
"""Functions and methods whose result is no tensor and needs no tensor's value."""
MULTIPLE_RESULTS = _names("chunk split unbind tensor_split topk sort kthvalue aminmax var_mean std_mean meshgrid")
REDUCTIONS_WITH_INDICES = _names("max min median mode")
"""Reductions that return values and indices where a dimension is given."""
FACTORIES = _names(
    "arange empty eye full hann_window linspace logspace ones tensor tril_indices triu_indices zeros as_tensor "
    "from_numpy"
)
SIZE_FACTORIES = _names("arange empty full linspace ones zeros")
"""Factories whose positional arguments must be Python numbers."""
NEW_METHODS = _names("new_zeros new_ones new_full new_empty new_tensor")
SIZE_METHODS = _names("expand repeat view reshape new_zeros new_ones new_empty")
MASK_FORMS = _names("to unsqueeze squeeze view reshape expand flatten repeat contiguous clone tril triu")
COMPARISONS = _names(
    "eq ne gt ge lt le isnan isinf isfinite logical_and logical_or logical_not logical_xor bool isclose isin"
)
NUMBER_METHODS = _names("item tolist numpy __bool__ __int__ __float__")
NUMBER_FUNCTIONS = _names(
    "numpy.array numpy.asarray int float bool range max min round math.sqrt math.log math.log2 math.exp math.ceil "
    "math.floor math.cos math.sin math.pow"
)
BOOL_RESULTS = _names("equal allclose")
"""Functions of tensors that return a Python bool."""
DATA_DEPENDENT = _names("nonzero unique unique_consecutive masked_select argwhere bincount")
RANDOM_FUNCTIONS = _names(
    "bernoulli multinomial normal poisson rand rand_like randint randint_like randn randn_like randperm "
    "nn.init.kaiming_normal_ nn.init.kaiming_uniform_ nn.init.normal_ nn.init.orthogonal_ nn.init.trunc_normal_ "
    "nn.init.uniform_ nn.init.xavier_normal_ nn.init.xavier_uniform_"
)
RANDOM_METHODS = _names(
    "bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal_ random_ uniform_"
)
RANDOM_GENERATORS = _names("numpy.random.default_rng numpy.random.Generator numpy.random.RandomState random.Random")
COMPLEX_RESULTS = _names("complex polar view_as_complex stft istft cfloat cdouble")
FLOAT64_DTYPES = _names("torch.float64 torch.double torch.complex128 torch.cdouble")
COMPLEX_DTYPES = _names("torch.complex32 torch.complex64 torch.cfloat torch.chalf")
HARMLESS_CUDA = _names(
    "amp device_count empty_cache ipc_collect is_available is_initialized max_memory_allocated max_memory_reserved "
    "memory_allocated memory_reserved reset_peak_memory_stats"
)
"""Parts of torch.cuda that answer, or do nothing, where there is no GPU."""
HARMLESS_DISTRIBUTED = _names("is_available is_initialized is_nccl_available is_gloo_available ReduceOp Backend")
GPU_LIBRARIES = _names(
    "apex bitsandbytes deepspeed flash_attn flash_attn_3 flash_attn_interface flashinfer hopper_attn liger_kernel "
    "sageattention spas_sage_attn torch_npu transformer_engine triton xformers xfuser"
)
FALSE_ON_TPU = _names(
    "torch.cuda.is_available torch.distributed.is_initialized torch.distributed.is_available torch.is_grad_enabled "
    "torch.jit.is_scripting torch.jit.is_tracing torch.compiler.is_compiling torch.onnx.is_in_onnx_export "
    "torch.backends.mps.is_available torch.is_autocast_enabled typing.TYPE_CHECKING"
)
"""Conditions that are false at inference on a TPU machine."""
FALSE_ATTRIBUTES = _names("training gradient_checkpointing is_cuda")
PROPERTY_DECORATORS = _names("property cached_property")
OTHER_DEVICES = _names("cuda mps npu hpu")
