// A fast, order-sensitive fingerprint of tensors' bytes: equal bits, equal digest. Not cryptographic.
#pragma once
#include <ATen/ATen.h>

#include <string>
#include <vector>

namespace torchpass {
// One 16-digit hexadecimal digest per tensor; device tensors are copied to the host first.
std::vector<std::string> digests(const std::vector<at::Tensor>& tensors);
}  // namespace torchpass
