"""CuTeDSL to PTX and a host object on a machine without a GPU, kept in a cache."""
