// A file on a tmpfs of its own, for memory on huge pages where memfds get none.
#pragma once

#include <cstdint>

namespace freetoken::host {

// An unnamed file, mode 0600, on a new tmpfs with huge=advise and room for `size_bytes`, which is
// mounted nowhere and lives as long as the file is open. Needs CAP_SYS_ADMIN, or user namespaces
// for ordinary users. Throws std::system_error where neither is allowed.
int open_private_tmpfs_file(std::uint64_t size_bytes);

}  // namespace freetoken::host
