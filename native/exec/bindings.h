// What the files of the `_exec` module share.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "src/kernels.h"

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);  // NOLINT(performance-no-int-to-ptr): the interface
}

// Throws std::invalid_argument for an unknown name.
freetoken::exec::Activation parse_activation(const std::string& name);

void bind_program(pybind11::module_& module);
