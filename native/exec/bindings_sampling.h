// The part of `_exec` that chooses tokens.
#pragma once
#include <pybind11/pybind11.h>

void bind_sampling(pybind11::module_& module);
