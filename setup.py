"""The C kernel, built with the package; without a compiler the torch codec serves instead."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "kvstow.codec._native",
            sources=["src/kvstow/codec/_native.c"],
            extra_compile_args=["-O3", "-std=c11", "-Wall", "-Wextra"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
