// Serves a model with a fusegen operator, without Python. Each line of the input is a request: the numbers of two or more rows of
// the model's input. The answer is a line with the numbers of the result.
//
//   fusegen build examples/server/model.py:bias_gelu --format extension --library mylib --arch cpu --dtype f32 --shape x=64x16 bias=16 --out built
//   python examples/server/model.py built/mylib.so model.pt2
//   cmake -S examples/server -B build -DCMAKE_PREFIX_PATH="$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')"
//   cmake --build build
//   seq -s ' ' 0 31 | build/server built/mylib.so model.pt2
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <iostream>
#include <sstream>
#include <string>
#include <vector>

constexpr int64_t kWidth = 16;

static std::vector<float> numbers(const std::string& line) {
  std::istringstream words(line);
  std::vector<float> found;
  for (float number; words >> number;) found.push_back(number);
  return words.eof() ? found : std::vector<float>();
}

int main(int count, char** arguments) {
  if (count != 3) {
    std::cerr << "usage: server LIBRARY PACKAGE" << std::endl;
    return 2;
  }
  if (!dlopen(arguments[1], RTLD_NOW)) {  // registers torch.ops.mylib.bias_gelu
    std::cerr << dlerror() << std::endl;
    return 1;
  }
  torch::NoGradGuard no_gradients;
  torch::inductor::AOTIModelPackageLoader model(arguments[2]);
  for (std::string line; std::getline(std::cin, line);) {
    std::vector<float> given = numbers(line);
    const int64_t rows = static_cast<int64_t>(given.size()) / kWidth;
    if (rows < 2 || rows * kWidth != static_cast<int64_t>(given.size())) {
      std::cout << "error: give the numbers of two or more rows of " << kWidth << std::endl;
      continue;
    }
    const at::Tensor result = model.run({torch::from_blob(given.data(), {rows, kWidth})}).front();
    for (int64_t row = 0; row < rows; ++row) std::cout << (row ? " " : "") << result[row].item<float>();
    std::cout << std::endl;
  }
}
