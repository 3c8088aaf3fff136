#include "isa_portable.h"
#include "make_kernels.h"

namespace freetoken::exec {

const Kernels* portable_kernels() {
  static const Kernels kTable = make_kernels<PortableIsa>(generic_table<PortableIsa>());
  return &kTable;
}

}  // namespace freetoken::exec
