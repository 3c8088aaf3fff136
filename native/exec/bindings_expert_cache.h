// The part of `_exec` that dispatches experts through the cache.
#pragma once
#include <pybind11/pybind11.h>

void bind_expert_cache(pybind11::module_& module);
