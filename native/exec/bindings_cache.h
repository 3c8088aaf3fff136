// The part of `_exec` that plans the expert cache.
#pragma once
#include <pybind11/pybind11.h>

void bind_cache(pybind11::module_& module);
