// Names that compilers and systems spell differently. The parts for MSVC and Windows are untested.
#pragma once

#include <string>

#ifdef _WIN32
#define NOMINMAX
#include <windows.h>
#else
#include <dlfcn.h>
#endif

#ifdef _MSC_VER
#define FG_HIDDEN
#define FG_EXPORT __declspec(dllexport)
#else
#define FG_HIDDEN __attribute__((visibility("hidden")))
#define FG_EXPORT __attribute__((visibility("default")))
#endif

namespace {
namespace fg {

// Libraries that are loaded by name.
#ifdef _WIN32
inline void* cuda_library() { return LoadLibraryA("nvcuda.dll"); }
inline void* torch_cuda_library() { return GetModuleHandleA("torch_cuda.dll"); }
inline void* function_in(void* library, const char* name) {
  return reinterpret_cast<void*>(GetProcAddress(static_cast<HMODULE>(library), name));
}
inline std::string loading_error() { return "error " + std::to_string(GetLastError()); }
#else
inline void* cuda_library() { return dlopen("libcuda.so.1", RTLD_NOW); }
inline void* torch_cuda_library() { return dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD); }
inline void* function_in(void* library, const char* name) { return dlsym(library, name); }
inline std::string loading_error() { return dlerror(); }
#endif

}  // namespace fg
}  // namespace
