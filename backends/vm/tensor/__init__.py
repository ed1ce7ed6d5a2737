"""Descriptors, tensor maps, swizzles and fragments: where the elements of a matrix are."""
