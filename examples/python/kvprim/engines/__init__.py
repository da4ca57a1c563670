# SPDX-License-Identifier: MIT
"""kvprim under the names of engines' own functions: a module for each engine's, which README.md lists.

    from kvprim.engines import install, vllm
    import vllm._custom_ops
    install(vllm, vllm._custom_ops)         the engine then calls kvprim

A function takes what the engine's takes and, except as README.md says, does what it does. Rows outside a cache are
skipped where the engine's kernels touch other memory. Errors are RuntimeErrors.
"""


def install(functions, *modules):
    """Puts each function of a module here into those of the engine's `modules` that have one of that name: where it is
    defined, and where it was imported from there before. Returns the names."""
    names = {name for name in vars(functions)["__all__"] for module in modules if hasattr(module, name)}
    for name in names:
        for module in modules:
            if hasattr(module, name):
                setattr(module, name, getattr(functions, name))
    return sorted(names)
