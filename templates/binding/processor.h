// The processor that CPU kernels need. Only the kernels are compiled for it: everything else runs on all processors of the
// architecture, and checks it before a kernel runs.
#pragma once

#include <algorithm>
#include <cstdio>
#include <string>

namespace {
namespace fg {

struct Level {
  const char* name;
  const char* added;  // its CPU features, as Linux names them, without those of the level before
};

// Returns the CPU features of a list that a processor lacks.
inline std::string lacking(const std::string& needed, const std::string& features) {
  const std::string all = " " + features + " ";
  std::string found;
  for (size_t start = 0; start < needed.size();) {
    const size_t end = std::min(needed.find(' ', start), needed.size());
    const std::string feature = needed.substr(start, end - start);
    if (all.find(" " + feature + " ") == std::string::npos) found += (found.empty() ? "" : ", ") + feature;
    start = end + 1;
  }
  return found;
}

// Returns the error of CPU kernels on a processor with some features; "" if they run, or if the features are unknown.
inline std::string refusal(const std::string& built_for, const std::string& needed, const std::string& features, const Level* levels,
                           const Level* end) {
  const std::string lacked = features.empty() ? "" : lacking(needed, features);
  if (lacked.empty()) return "";
  std::string here = "other instructions", option;
  for (; levels != end && lacking(levels->added, features).empty(); ++levels) {
    here = levels->name;
    option = "; for this one: fusegen build … --arch cpu --cpu " + here;
  }
  return "the CPU kernels were built for " + built_for + ", but this processor has " + here + " and lacks " + lacked +
         "\n  try: build them on a machine like this one" + option;
}

// Returns the features of this machine's processor; "" if the system does not list them.
inline std::string cpu_features() {
  std::FILE* file = std::fopen("/proc/cpuinfo", "r");
  if (!file) return "";
  std::string line;
  bool is_found = false;
  for (int letter = std::getc(file); letter != EOF && !is_found; letter = std::getc(file)) {
    is_found = letter == '\n' && line.compare(0, 5, "flags") == 0;
    if (letter == '\n' && !is_found) line.clear();
    if (letter != '\n') line += letter == '\t' ? ' ' : static_cast<char>(letter);
  }
  std::fclose(file);
  return is_found ? line.substr(line.find(':') + 1) : "";
}

}  // namespace fg
}  // namespace
