"""Bytes of an element, by name or by asking the dtype itself."""

from typing import Final, Protocol, TypeAlias

from kvplugin.errors import ConfigError, unknown_name


class SizedDtype(Protocol):
    """A dtype of a tensor library: `torch.dtype` and `numpy.dtype` both qualify."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""


Dtype: TypeAlias = str | SizedDtype
"""A name from `DTYPE_BYTES`, or an object that knows its `itemsize`."""

DTYPE_BYTES: Final = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Names as torch writes them, without ``torch.``, and bytes of an element."""


def dtype_bytes(dtype: Dtype) -> int:
    """Bytes of one element of `dtype`.

    Raises:
        ConfigError: a name that `DTYPE_BYTES` lacks, or an object without a positive
            integer `itemsize`.
    """
    if isinstance(dtype, str):
        size = DTYPE_BYTES.get(dtype)
        if size is None:
            raise unknown_name("dtype", dtype, DTYPE_BYTES, "dtype")
        return size
    itemsize = getattr(dtype, "itemsize", None)
    if not isinstance(itemsize, int) or itemsize <= 0:
        raise ConfigError(
            f"dtype must be a name or have an integer itemsize, not {dtype!r}"
        )
    return itemsize


def dtype_name(dtype: Dtype) -> str:
    """The name of `dtype`, equal for ``"bfloat16"`` and ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
