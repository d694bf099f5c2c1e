"""Conversion of types between numba-cuda and numba-cuda-mlir, which has classes of its own with the same names."""

_NUMBERS = ("Integer", "Float")


def converted(typ, types):
    """Return the type of the module ``types``, of either compiler, that a type of the other one corresponds to."""
    kind = type(typ).__name__
    if kind in _NUMBERS:
        return getattr(types, typ.name)
    if kind == "Boolean":
        return types.boolean
    if kind == "NoneType":
        return types.none
    if kind == "IntegerLiteral":
        return types.literal(typ.literal_value)
    if kind == "CPointer":
        return types.CPointer(converted(typ.dtype, types))
    if kind == "Array":
        dtype = converted(typ.dtype, types)
        return types.Array(dtype, typ.ndim, typ.layout, readonly=not typ.mutable, aligned=typ.aligned)
    if kind == "UniTuple":
        return types.UniTuple(converted(typ.dtype, types), typ.count)
    if kind == "NamedUniTuple":
        return types.NamedUniTuple(converted(typ.dtype, types), typ.count, typ.instance_class)
    if kind in ("Tuple", "StarArgTuple", "StarArgUniTuple", "NamedTuple"):
        items = [converted(item, types) for item in typ.types]
        if kind == "NamedTuple":
            return types.NamedTuple(items, typ.instance_class)
        return types.Tuple(items) if kind == "Tuple" else types.StarArgTuple(items)
    raise NotImplementedError(f"{typ} ({kind}) has no counterpart in numba-cuda-mlir that is known here")
