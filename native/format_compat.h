// std::format for libstdc++ before 13, as far as mlx-c's private io header uses it: plain "{}" only.
#pragma once
#if !__has_include(<format>)
#include <sstream>
#include <string>
#include <string_view>
namespace std {
template <class... Args>
std::string format(std::string_view pattern, Args&&... args) {
  std::ostringstream out;
  size_t at = 0;
  auto put = [&](const auto& value) {
    size_t brace = pattern.find("{}", at);
    if (brace == std::string_view::npos) return;
    out << pattern.substr(at, brace - at) << value;
    at = brace + 2;
  };
  (put(args), ...);
  out << pattern.substr(at);
  return out.str();
}
} // namespace std
#endif
