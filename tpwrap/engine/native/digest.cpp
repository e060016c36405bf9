#include "digest.hpp"

#include <ATen/core/grad_mode.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace torchpass {
namespace {

constexpr uint64_t kA = 0x9E3779B97F4A7C15ull, kB = 0xC2B2AE3D27D4EB4Full;
constexpr int kLanes = 16;
constexpr size_t kBlock = 8 * kLanes;
using Lanes = std::array<uint64_t, kLanes>;

uint64_t mix(uint64_t x) {
  x ^= x >> 31;
  x *= kB;
  return x ^ (x >> 29);
}

// Take in `blocks` blocks at `p`, each lane one word of a block. Independent lanes keep the multiplier busy.
void absorb(Lanes& lanes, const unsigned char* p, size_t blocks) {
  for (; blocks > 0; blocks--, p += kBlock)
    for (int i = 0; i < kLanes; i++) {
      uint64_t word;
      std::memcpy(&word, p + 8 * i, 8);
      uint64_t x = (lanes[i] ^ word) * kA;
      lanes[i] = x ^ (x >> 32);
    }
}

#if defined(__x86_64__)
// The same, about three times as fast: state is digested while it moves, on the same cores. There is no multiplication
// of 64 bits before AVX-512: it takes three of 32.
__attribute__((target("avx2"))) void absorb_avx2(Lanes& lanes, const unsigned char* p, size_t blocks) {
  const __m256i low = _mm256_set1_epi64x(kA & 0xFFFFFFFFu), high = _mm256_set1_epi64x(kA >> 32);
  __m256i lane[kLanes / 4];
  std::memcpy(lane, lanes.data(), sizeof lane);
  for (; blocks > 0; blocks--, p += kBlock)
#pragma GCC unroll 4
    for (int i = 0; i < kLanes / 4; i++) {
      __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * i));
      __m256i x = _mm256_xor_si256(lane[i], word);
      __m256i cross = _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(x, 32), low), _mm256_mul_epu32(x, high));
      x = _mm256_add_epi64(_mm256_mul_epu32(x, low), _mm256_slli_epi64(cross, 32));
      lane[i] = _mm256_xor_si256(x, _mm256_srli_epi64(x, 32));
    }
  std::memcpy(lanes.data(), lane, sizeof lane);
}
#endif

uint64_t digest(const unsigned char* p, size_t size) {
  Lanes lanes;
  for (int i = 0; i < kLanes; i++) lanes[i] = mix(kA * static_cast<uint64_t>(i + 1) ^ size);
  const size_t blocks = size / kBlock;
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2)
    absorb_avx2(lanes, p, blocks);
  else
#endif
    absorb(lanes, p, blocks);
  Lanes tail{};
  std::memcpy(tail.data(), p + blocks * kBlock, size % kBlock);
  uint64_t h = kB;
  for (int i = 0; i < kLanes; i++) h = mix(h ^ mix(lanes[i] ^ tail[i])) + static_cast<uint64_t>(i) * kA;
  return mix(h);
}

}  // namespace

std::vector<std::string> digests(const std::vector<at::Tensor>& tensors) {
  at::NoGradGuard no_grad;
  std::vector<std::string> out;
  out.reserve(tensors.size());
  for (auto& t : tensors) {
    auto host = t.detach().to(at::kCPU).contiguous();
    char text[17];
    std::snprintf(text, sizeof text, "%016llx",
                  static_cast<unsigned long long>(
                      digest(static_cast<const unsigned char*>(host.data_ptr()), host.nbytes())));
    out.emplace_back(text);
  }
  return out;
}

}  // namespace torchpass
