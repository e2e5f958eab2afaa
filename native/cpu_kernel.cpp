// A primitive of MLX's lazy graph whose CPU evaluation calls a Rust function.
//
// The function runs on the stream's own thread, in order with MLX's operations; arrays reach it as they lie in
// memory, strides included. It must not unwind: it returns null, or a message (allocated with malloc) that
// becomes an exception of the evaluation. A second function builds the graph of its gradients.

#include <mlx/backend/cpu/encoder.h>
#include <mlx/mlx.h>
#include <mlx/primitives.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace mx = mlx::core;

extern "C" {

// An array as the kernel sees it; shape and strides (in elements) have ndim entries.
struct MlxBunView {
  void* data;
  const int32_t* shape;
  const int64_t* strides;
  int32_t ndim;
  int32_t dtype;
};

struct MlxBunOutput {
  const int32_t* shape;
  int32_t ndim;
  int32_t dtype;
};

typedef char* (*MlxBunCall)(
    void* kernel,
    const MlxBunView* inputs,
    size_t input_count,
    const MlxBunView* outputs,
    size_t output_count);
typedef void (*MlxBunDrop)(void* kernel);

// mlx-c's handles: a pointer to the object.
struct MlxBunArray {
  void* ctx;
};
struct MlxBunStream {
  void* ctx;
};

// Fills `results` with a gradient for each of `argnums`; owns every handle it is given, and gives away those it
// returns.
typedef char* (*MlxBunVjp)(
    void* kernel,
    const MlxBunArray* primals,
    size_t primal_count,
    const MlxBunArray* cotangents,
    size_t cotangent_count,
    const int32_t* argnums,
    size_t argnum_count,
    MlxBunArray* results);
}

extern "C" {

// What is said when there is no memory for what was to be said; never freed.
extern char mlx_bun_no_memory[];
char mlx_bun_no_memory[] = "not enough memory, not even for the error's message";

// Begins (1) or ends (-1) a part of this thread's work that handles an allocation that fails.
void mlx_bun_fallible(int32_t step);
}

namespace {

// From this size on it is tried out whether there is memory.
constexpr size_t LARGE = size_t{64} << 20;

// MLX's allocator may return nothing, and does not say so. It counts what it failed to get as in use, too, and from
// its limit on every evaluation waits for memory that nobody frees: a large failure must not reach it.
mx::allocator::Buffer allocate(size_t bytes) {
  mlx_bun_fallible(1);
  bool fits = true;
  if (bytes >= LARGE) {
    // Volatile, or the compiler may leave the trial out.
    void* volatile trial = std::malloc(bytes);
    fits = trial != nullptr;
    std::free(trial);
  }
  auto buffer = fits ? mx::allocator::malloc(bytes) : mx::allocator::Buffer{nullptr};
  mlx_bun_fallible(-1);
  if (bytes > 0 && !buffer.ptr()) {
    throw std::runtime_error("not enough memory: an array of " + std::to_string(bytes) + " bytes does not fit");
  }
  return buffer;
}

char* said(const std::exception& error) {
  auto copy = strdup(error.what());
  return copy ? copy : mlx_bun_no_memory;
}

// In the order of mlx-c's enumeration.
mx::Dtype type_of(int32_t number) {
  static const mx::Dtype types[] = {
      mx::bool_, mx::uint8, mx::uint16, mx::uint32, mx::uint64, mx::int8, mx::int16,
      mx::int32, mx::int64, mx::float16, mx::float32, mx::float64, mx::bfloat16, mx::complex64};
  return types[number];
}

struct Kernel {
  void* object;
  MlxBunCall call;
  MlxBunVjp vjp;
  MlxBunDrop drop;
  std::string name;

  Kernel(void* object, MlxBunCall call, MlxBunVjp vjp, MlxBunDrop drop, const char* name)
      : object(object), call(call), vjp(vjp), drop(drop), name(name) {}
  Kernel(const Kernel&) = delete;
  ~Kernel() {
    drop(object);
  }
};

std::vector<MlxBunArray> handles(const std::vector<mx::array>& arrays) {
  std::vector<MlxBunArray> out;
  out.reserve(arrays.size());
  for (auto& array : arrays) {
    out.push_back(MlxBunArray{new mx::array(array)});
  }
  return out;
}

// Throws what a Rust function said, if it said something.
void raise(const Kernel& kernel, char* message) {
  if (message) {
    std::string what = "[" + kernel.name + "] " + message;
    if (message != mlx_bun_no_memory) {
      std::free(message);
    }
    throw std::runtime_error(what);
  }
}

// Owns what the views point to until the kernel has run.
struct Call {
  std::vector<mx::array> arrays;
  std::vector<MlxBunView> views;

  void add(const mx::array& array) {
    arrays.push_back(array);
  }

  void finish() {
    views.reserve(arrays.size());
    for (auto& array : arrays) {
      views.push_back(MlxBunView{
          array.data<char>(),
          array.shape().data(),
          array.strides().data(),
          static_cast<int32_t>(array.ndim()),
          static_cast<int32_t>(array.dtype().val()),
      });
    }
  }
};

class RustPrimitive : public mx::Primitive {
 public:
  RustPrimitive(mx::Stream stream, std::shared_ptr<Kernel> kernel)
      : mx::Primitive(stream), kernel_(std::move(kernel)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto call = std::make_shared<Call>();
    call->arrays.reserve(inputs.size() + outputs.size());
    for (auto& output : outputs) {
      output.set_data(allocate(output.nbytes()));
    }
    // Copies of the handles would forbid donation later; shared without their graph they only pin the buffers.
    for (auto& input : inputs) {
      call->add(mx::array::unsafe_weak_copy(input));
    }
    for (auto& output : outputs) {
      call->add(mx::array::unsafe_weak_copy(output));
    }
    call->finish();
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (auto& input : inputs) {
      encoder.set_input_array(input);
    }
    for (auto& output : outputs) {
      encoder.set_output_array(output);
    }
    encoder.dispatch([kernel = kernel_, call = std::move(call), input_count = inputs.size()]() {
      auto views = call->views.data();
      // MLX keeps what is thrown here for whoever waits on the stream.
      raise(*kernel, kernel->call(
          kernel->object, views, input_count, views + input_count, call->views.size() - input_count));
    });
  }

  std::vector<mx::array> vjp(
      const std::vector<mx::array>& primals,
      const std::vector<mx::array>& cotangents,
      const std::vector<int>& argnums,
      const std::vector<mx::array>&) override {
    auto in = handles(primals);
    auto given = handles(cotangents);
    std::vector<int32_t> wanted(argnums.begin(), argnums.end());
    std::vector<MlxBunArray> found(argnums.size(), MlxBunArray{nullptr});
    raise(*kernel_, kernel_->vjp(
        kernel_->object,
        in.data(), in.size(),
        given.data(), given.size(),
        wanted.data(), wanted.size(),
        found.data()));
    std::vector<mx::array> gradients;
    gradients.reserve(found.size());
    for (auto& handle : found) {
      std::unique_ptr<mx::array> array(static_cast<mx::array*>(handle.ctx));
      gradients.push_back(std::move(*array));
    }
    return gradients;
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("[" + kernel_->name + "] runs on the CPU only");
  }

  const char* name() const override {
    return kernel_->name.c_str();
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    auto rust = dynamic_cast<const RustPrimitive*>(&other);
    return rust && rust->kernel_ == kernel_;
  }

 private:
  std::shared_ptr<Kernel> kernel_;
};

} // namespace

// Takes ownership of `object` in every case. Returns null on success, else a message to free with `free`.
extern "C" char* mlx_bun_cpu_kernel(
    void* object,
    MlxBunCall call,
    MlxBunVjp vjp,
    MlxBunDrop drop,
    const char* name,
    const MlxBunArray* inputs,
    size_t input_count,
    const MlxBunOutput* outputs,
    size_t output_count,
    MlxBunStream stream,
    MlxBunArray* results) {
  try {
    auto kernel = std::make_shared<Kernel>(object, call, vjp, drop, name);
    std::vector<mx::array> in;
    in.reserve(input_count);
    for (size_t i = 0; i < input_count; i++) {
      in.push_back(*static_cast<mx::array*>(inputs[i].ctx));
    }
    std::vector<mx::Shape> shapes;
    std::vector<mx::Dtype> dtypes;
    for (size_t i = 0; i < output_count; i++) {
      shapes.emplace_back(outputs[i].shape, outputs[i].shape + outputs[i].ndim);
      dtypes.push_back(type_of(outputs[i].dtype));
    }
    auto where = *static_cast<mx::Stream*>(stream.ctx);
    auto made = mx::array::make_arrays(std::move(shapes), dtypes, std::make_shared<RustPrimitive>(where, std::move(kernel)), in);
    for (size_t i = 0; i < output_count; i++) {
      results[i].ctx = new mx::array(std::move(made[i]));
    }
    return nullptr;
  } catch (const std::exception& error) {
    return said(error);
  }
}

// An array over `data`, or a copy of it where `drop` is null or MLX takes no foreign memory. `drop` is called with
// `payload` when the data is not needed any more, in every case. Returns as `mlx_bun_cpu_kernel`.
extern "C" char* mlx_bun_array(
    void* data,
    const int32_t* shape,
    int32_t ndim,
    int32_t dtype,
    void* payload,
    MlxBunDrop drop,
    MlxBunArray* result) {
  std::shared_ptr<void> owner;
  if (drop) {
    owner = std::shared_ptr<void>(payload, drop);
  }
  try {
    mx::Shape dims(shape, shape + ndim);
    auto type = type_of(dtype);
    size_t bytes = mx::size_of(type);
    for (auto dim : dims) {
      bytes *= static_cast<size_t>(dim);
    }
    auto foreign = owner ? mx::allocator::make_buffer(data, bytes) : mx::allocator::Buffer{nullptr};
    if (foreign.ptr()) {
      auto release = [owner](mx::allocator::Buffer buffer) { mx::allocator::release(buffer); };
      result->ctx = new mx::array(foreign, std::move(dims), type, release);
    } else {
      auto made = std::make_unique<mx::array>(allocate(bytes), std::move(dims), type);
      if (bytes > 0) {
        std::memcpy(made->data<char>(), data, bytes);
      }
      result->ctx = made.release();
    }
    return nullptr;
  } catch (const std::exception& error) {
    return said(error);
  }
}
