// Runs calls of the native library for another process: made for an emulator, where the library is of another
// machine than the Python that tests it. tests/native/remote.py is the other side.
//
// Usage: calls LIBRARY. Reads requests from the standard input and answers on the standard output, all in words
// of 64 bits (both machines are little-endian):
//   request: length of the name, number of structs, number of pointers, bytes of memory; the name; for each struct
//            its number of words and the words; for each pointer (struct, word, offset in the memory); the memory
//   answer:  the return value; the memory
// A pointer to a struct that does not exist is an argument by itself, after the structs.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

void read_all(void* data, size_t bytes) {
  if (bytes != 0 && fread(data, 1, bytes, stdin) != bytes) exit(2);
}

int64_t read_word() {
  int64_t word;
  read_all(&word, sizeof word);
  return word;
}

void write_all(const void* data, size_t bytes) {
  if (bytes != 0 && fwrite(data, 1, bytes, stdout) != bytes) exit(2);
}

int64_t call(void* function, const std::vector<void*>& arguments) {
  const auto& a = arguments;
  switch (a.size()) {
    case 0: return reinterpret_cast<int64_t (*)()>(function)();
    case 1: return reinterpret_cast<int (*)(void*)>(function)(a[0]);
    case 2: return reinterpret_cast<int (*)(void*, void*)>(function)(a[0], a[1]);
    default: return reinterpret_cast<int (*)(void*, void*, void*)>(function)(a[0], a[1], a[2]);
  }
}

void serve(void* library, size_t name_length) {
  const size_t structs = read_word(), pointers = read_word(), bytes = read_word();
  std::string name(name_length, ' ');
  read_all(&name[0], name_length);
  std::vector<std::vector<int64_t>> words(structs);
  for (auto& one : words) {
    one.resize(read_word());
    read_all(one.data(), one.size() * sizeof(int64_t));
  }
  std::vector<int64_t> places(3 * pointers);
  read_all(places.data(), places.size() * sizeof(int64_t));
  std::vector<char> memory(bytes + 1);
  read_all(memory.data(), bytes);

  std::vector<void*> arguments;
  for (auto& one : words) arguments.push_back(one.data());
  for (size_t i = 0; i < places.size(); i += 3) {
    char* const target = memory.data() + places[i + 2];
    if (static_cast<size_t>(places[i]) == structs) arguments.push_back(target);
    else words[places[i]][places[i + 1]] = reinterpret_cast<int64_t>(target);
  }
  void* const function = dlsym(library, name.c_str());
  if (function == nullptr) exit(3);
  const int64_t result = call(function, arguments);
  write_all(&result, sizeof result);
  write_all(memory.data(), bytes);
  fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  void* const library = argc == 2 ? dlopen(argv[1], RTLD_NOW) : nullptr;
  if (library == nullptr) {
    fprintf(stderr, "calls: %s\n", argc == 2 ? dlerror() : "usage: calls LIBRARY");
    return 1;
  }
  for (int64_t name_length; fread(&name_length, sizeof name_length, 1, stdin) == 1;)
    serve(library, static_cast<size_t>(name_length));
}
