"""`humming.dtypes`: every number type as an attribute."""

from chord.compat.dtypes import TYPES, DataType

from_any = DataType.from_any
from_str = DataType.from_str
from_torch_dtype = DataType.from_torch_dtype

globals().update(TYPES)

__all__ = ["DataType", "from_any", "from_str", "from_torch_dtype", *TYPES]
