// What the decoders of weight codes share.
#pragma once
#include <cstddef>
#include <type_traits>

namespace freetoken::exec {
namespace {

// A decoder hands on what it decoded in order, sink(Constant<i>{}, lanes) for i = 0, 1 ...
template <int Value>
using Constant = std::integral_constant<int, Value>;

// Bytes ahead of the codes in use that are prefetched: the hardware's prefetcher stops at every
// 4 KiB page, which at the pace of memory is used up in less than one access takes.
inline constexpr std::size_t kAheadBytes = 4096;

// How far ahead of byte `offset` of a block, where `blocks` are read side by side: what follows the
// end of one is read already, so that its stream goes on behind all of them.
inline std::size_t ahead_bytes(std::size_t offset_bytes, std::size_t block_bytes,
                               std::size_t blocks) {
  const bool within = offset_bytes + kAheadBytes < block_bytes;
  return within ? kAheadBytes : kAheadBytes + (blocks - 1) * block_bytes;
}

}  // namespace
}  // namespace freetoken::exec
