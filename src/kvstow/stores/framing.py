"""The stored form of a chunk: a fixed header, then the payload.

::

    offset size  field            (little endian)
    0      8     magic            b"KVSTOW\\r\\n"
    8      2     version          1
    10     2     kind             1 = chunk of a paged group
    12     4     rank
    16     8     payload bytes
    24     8     xxh3-64 of the payload
    32     32    key
    64     32    namespace digest
    96     8     xxh3-64 of bytes 0..96
    104    ..    zero, up to HEADER_BYTES

The header is `HEADER_BYTES` long and the whole frame is padded to a multiple of it, so that a
frame in page-aligned memory can be written with O_DIRECT as it is. Design:
docs/design/002-stored-form.md.
"""
