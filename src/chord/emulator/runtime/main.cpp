// A launch as a program of its own, for sanitizers and for gdb: reads the case that runner.py has
// written, runs it and writes the tensors back.
//
// CASE is text: `blocks seed num_tensors num_words`, a line `name use bytes` a tensor, then the
// 8-byte words of the parameters as `value number` or `tensor index`. DATA holds the tensors one
// after another, before and after.
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "launch.hpp"

namespace {

struct Tensor {
  std::string name;
  int use = 0;
  std::size_t bytes = 0;
  std::unique_ptr<char, decltype(&std::free)> memory{nullptr, std::free};
};

constexpr std::size_t kAlignment = 256;
constexpr int kErrorBytes = 1 << 20;

// An allocation of its own a tensor, so that the address sanitizer sees its ends.
std::vector<Tensor> read_tensors(std::istream& description, std::istream& data, int count) {
  std::vector<Tensor> tensors(count);
  for (Tensor& tensor : tensors) {
    description >> tensor.name >> tensor.use >> tensor.bytes;
    void* memory = nullptr;
    if (posix_memalign(&memory, kAlignment, tensor.bytes + 1) != 0) std::abort();
    tensor.memory.reset(static_cast<char*>(memory));
    data.read(tensor.memory.get(), static_cast<std::streamsize>(tensor.bytes));
  }
  return tensors;
}

std::vector<std::uint64_t> read_words(std::istream& description, const std::vector<Tensor>& tensors,
                                      int count) {
  std::vector<std::uint64_t> words(count);
  for (std::uint64_t& word : words) {
    std::string kind;
    description >> kind >> word;
    if (kind == "tensor") word = reinterpret_cast<std::uint64_t>(tensors[word].memory.get());
  }
  return words;
}

}  // namespace

#ifdef CHORD_ADDRESS_SANITIZER
// A launch that fails abandons its fibers, and with them what they hold.
extern "C" const char* __asan_default_options() { return "detect_leaks=0"; }
#endif

int main(int count, char** arguments) {
  if (count != 3) {
    std::cerr << "usage: " << arguments[0] << " CASE DATA\n";
    return 2;
  }
  std::ifstream description(arguments[1]);
  int blocks, num_tensors, num_words;
  unsigned long long seed;
  description >> blocks >> seed >> num_tensors >> num_words;
  std::ifstream data(arguments[2], std::ios::binary);
  const std::vector<Tensor> tensors = read_tensors(description, data, num_tensors);
  const std::vector<std::uint64_t> params = read_words(description, tensors, num_words);
  std::vector<ChordTensor> passed;
  for (const Tensor& tensor : tensors) {
    passed.push_back({tensor.name.c_str(), tensor.memory.get(), tensor.bytes, tensor.use});
  }
  std::vector<char> error(kErrorBytes);
  const int failed = chord_emulator_run(&chord_unit, params.data(), blocks, seed, passed.data(),
                                        num_tensors, error.data(), kErrorBytes);
  if (failed != 0) std::cerr << error.data() << "\n";
  std::ofstream after(arguments[2], std::ios::binary);
  for (const Tensor& tensor : tensors) {
    after.write(tensor.memory.get(), static_cast<std::streamsize>(tensor.bytes));
  }
  return failed;
}
