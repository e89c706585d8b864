// A pretend device for tests: its memory is the CPU's, but no tensor of the CPU may meet one of the device in an op.
//
// Every op without a kernel of its own below goes through `on_cpu`: tensors of the device are relabelled as tensors of
// the CPU that share their memory, the CPU's kernel runs, and what it returns is relabelled as the device's. Nothing is
// copied, so views, in-place ops and `out=` work as they do on the CPU. The device has a random generator of its own.
//
// It is stricter than cuda in one thing: cuda takes index tensors of the CPU, and copies them at every use.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <string_view>
#include <unordered_set>

namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType);
}

namespace {

using at::Tensor;
using c10::Storage;
using OptionalTensor = std::optional<Tensor>;

const c10::Device kDevice(c10::kPrivateUse1, 0);
const c10::Device kHost(c10::kCPU);

std::atomic<bool> without_float64{false};
std::atomic<bool> counted{false};

bool ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == c10::kPrivateUse1; }

void check_type(c10::ScalarType type) {
  bool wide = type == at::kDouble || type == at::kComplexDouble;
  TORCH_CHECK_TYPE(!(wide && without_float64), "the pretend device has no float64 here, as Apple's mps has none");
}

// -------------------------------------------------------------------------------------------------------------- memory

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto data = c10::GetCPUAllocator()->allocate(bytes);
    data.unsafe_set_device(kDevice);
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return c10::GetCPUAllocator()->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

Allocator allocator;
REGISTER_ALLOCATOR(c10::kPrivateUse1, &allocator)

// The same memory under the other label; the memory lives as long as either.
c10::DataPtr relabelled(const Storage& storage, c10::Device device) {
  return {storage.mutable_data(), new Storage(storage), [](void* kept) { delete static_cast<Storage*>(kept); }, device};
}

// What one op sees: pairs of storages and tensors that share memory, one of the device and one of the CPU.
class Labels {
 public:
  Tensor on_cpu(const Tensor& tensor) {
    if (!ours(tensor)) return tensor;
    TORCH_CHECK(tensor.layout() == c10::kStrided, "the pretend device has strided tensors only");
    for (const auto& [device, host] : tensors_)
      if (device.is_same(tensor)) return host;
    auto host = labelled(tensor, storage_on_cpu(tensor.storage()), c10::DispatchKey::CPU);
    tensors_.emplace_back(tensor, host);
    return host;
  }

  Tensor on_device(const Tensor& tensor) {
    if (!tensor.defined() || ours(tensor)) return tensor;
    for (const auto& [device, host] : tensors_)
      if (host.is_same(tensor)) return device;
    TORCH_CHECK(tensor.layout() == c10::kStrided, "the pretend device has strided tensors only");
    check_type(tensor.scalar_type());
    return labelled(tensor, storage_on_device(tensor.storage()), c10::DispatchKey::PrivateUse1);
  }

  Storage storage_on_cpu(const Storage& storage) {
    for (const auto& [device, host] : storages_)
      if (same(device, storage)) return host;
    Storage host({}, storage.nbytes(), relabelled(storage, kHost), c10::GetCPUAllocator(), true);
    storages_.emplace_back(storage, host);
    return host;
  }

  // Carries over what the op did to its arguments beyond their numbers: new memory, sizes, strides or storages.
  void settle() {
    for (size_t index = 0; index < storages_.size(); ++index) {
      const auto& [device, host] = storages_[index];
      if (device.data() == host.data() && device.nbytes() == host.nbytes()) continue;
      auto* changed = device.unsafeGetStorageImpl();
      changed->set_data_ptr_noswap(relabelled(host, kDevice));
      changed->set_nbytes(host.nbytes());
    }
    for (const auto& [device, host] : tensors_) {
      auto* changed = device.unsafeGetTensorImpl();
      auto storage = storage_on_device(host.storage());
      if (!same(device.storage(), storage)) changed->set_storage_keep_dtype(storage);
      if (device.sizes() != host.sizes() || device.strides() != host.strides())
        changed->set_sizes_and_strides(host.sizes(), host.strides());
      if (device.storage_offset() != host.storage_offset()) changed->set_storage_offset(host.storage_offset());
    }
  }

 private:
  static bool same(const Storage& one, const Storage& two) {
    return one.unsafeGetStorageImpl() == two.unsafeGetStorageImpl();
  }

  Storage storage_on_device(const Storage& storage) {
    for (const auto& [device, host] : storages_)
      if (same(host, storage)) return device;
    Storage device({}, storage.nbytes(), relabelled(storage, kDevice), &allocator, true);
    storages_.emplace_back(device, storage);
    return device;
  }

  static Tensor labelled(const Tensor& tensor, Storage storage, c10::DispatchKey key) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    impl->set_storage_offset(tensor.storage_offset());
    if (tensor.is_conj()) impl->_set_conj(true);
    if (tensor.is_neg()) impl->_set_neg(true);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    return made;
  }

  std::vector<std::pair<Storage, Storage>> storages_;
  std::vector<std::pair<Tensor, Tensor>> tensors_;
};

// ---------------------------------------------------------------------------------------------------------- randomness

// A generator of the CPU under the label of the device.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(at::Generator inner)
      : c10::GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(inner.clone()); }
  at::Generator inner;
};

const at::Generator& default_generator() {
  static auto made = at::make_generator<Generator>(at::detail::createCPUGenerator());
  return made;
}

at::Generator inner_generator(const at::Generator& generator) {
  TORCH_CHECK(
      generator.device().type() == c10::kPrivateUse1,
      "Expected a generator of the pretend device, but found one of ", generator.device());
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}

// While it lives, the CPU's default generator continues the device's: for random ops that take no generator.
class Lent {
 public:
  Lent() : cpu_(at::detail::getDefaultCPUGenerator()), before_(cpu_.get_state()) {
    cpu_.set_state(default_generator().get_state());
  }
  ~Lent() {
    at::Generator(default_generator()).set_state(cpu_.get_state());
    cpu_.set_state(before_);
  }

 private:
  at::Generator cpu_;
  Tensor before_;
};

// -------------------------------------------------------------------------------------------------------- any other op

// Whether an op takes a single number from the CPU, on every device: the elementwise ones do, and some more.
bool takes_numbers(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string_view> names{
      "aten::fill", "aten::fill_", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
      "aten::masked_fill", "aten::masked_fill_", "aten::where"};
  return op.hasTag(at::Tag::pointwise) || names.count(op.operator_name().name) > 0;
}

std::vector<Tensor> tensors_of(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  std::vector<Tensor> found;
  if (value.isOptionalTensorList())
    for (const OptionalTensor& one : value.toOptionalTensorVector())
      if (one) found.push_back(*one);
  return found;
}

template <class Change>
void change_tensors(c10::IValue& value, Change change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    auto all = value.toTensorVector();
    for (auto& one : all) one = change(one);
    value = c10::List<Tensor>(all);
  } else if (value.isOptionalTensorList()) {
    c10::List<OptionalTensor> changed;
    for (const OptionalTensor& one : value.toOptionalTensorVector())
      changed.push_back(one ? OptionalTensor(change(*one)) : one);
    value = changed;
  }
}

void refuse_mixed(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t begin) {
  const auto& arguments = op.schema().arguments();
  for (size_t index = 0; index < arguments.size(); ++index) {
    const auto* alias = arguments[index].alias_info();
    bool written = alias && alias->isWrite();
    for (const auto& one : tensors_of(stack[begin + index])) {
      if (!one.defined() || ours(one) || one.unsafeGetTensorImpl()->is_wrapped_number()) continue;
      bool number = one.device() == kHost && one.dim() == 0 && !written && takes_numbers(op);
      TORCH_CHECK(
          number, "Expected all tensors to be on the same device, but argument '", arguments[index].name(), "' of ",
          op.operator_name(), " with sizes ", one.sizes(), " is on ", one.device(), " and others are on pretend:0");
    }
  }
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t begin = stack->size() - arguments.size();
  refuse_mixed(op, *stack, begin);
  Labels labels;
  bool to_cpu = false;
  bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  for (size_t index = 0; index < arguments.size(); ++index) {
    auto& value = (*stack)[begin + index];
    if (arguments[index].name() == "generator") {
      value = inner_generator(value.isNone() ? default_generator() : value.toGenerator());
      draws = false;
    } else if (value.isDevice()) {
      to_cpu = value.toDevice() == kHost;
      value = kHost;
    } else if (value.isStorage() && value.toStorage().device_type() == c10::kPrivateUse1) {
      value = labels.storage_on_cpu(value.toStorage());
    } else {
      change_tensors(value, [&](const Tensor& one) { return labels.on_cpu(one); });
    }
  }
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::optional<Lent> lent;
    if (draws) lent.emplace();
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  labels.settle();
  if (to_cpu) return;
  for (size_t index = stack->size() - op.schema().returns().size(); index < stack->size(); ++index)
    change_tensors((*stack)[index], [&](const Tensor& one) { return labels.on_device(one); });
}

// --------------------------------------------------------------------------------- ops that need a kernel of their own

Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto wanted = c10::dtype_or_default(type);
  check_type(wanted);
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, keys, wanted, format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  auto wanted = c10::dtype_or_default(type);
  check_type(wanted);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), wanted);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  Labels labels;
  labels.on_cpu(to).copy_(labels.on_cpu(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

Tensor convolution(
    const Tensor& input, const Tensor& weight, const OptionalTensor& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  bool together = ours(input) && ours(weight) && (!bias || !bias->defined() || ours(*bias));
  TORCH_CHECK(together, "Expected all tensors to be on the same device, but those of a convolution are not");
  Labels labels;
  OptionalTensor shift = bias ? OptionalTensor(labels.on_cpu(*bias)) : bias;
  return labels.on_device(at::convolution_symint(
      labels.on_cpu(input), labels.on_cpu(weight), shift, stride, padding, dilation, transposed, output_padding,
      groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> wanted) {
  bool together = ours(gradient) && ours(input) && ours(weight);
  TORCH_CHECK(together, "Expected all tensors to be on the same device, but those of a convolution are not");
  Labels labels;
  c10::SymInt channels = gradient.sym_size(1);
  auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
      labels.on_cpu(gradient), labels.on_cpu(input), labels.on_cpu(weight), c10::SymIntArrayRef(channels), stride,
      padding, dilation, transposed, output_padding, groups, wanted);
  return {labels.on_device(of_input), labels.on_device(of_weight), labels.on_device(of_bias)};
}

// Attention takes the composite path, which is made of other ops.
int64_t attention_choice(
    const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, double, bool, std::optional<double>, bool) {
  return 0;
}

Tensor joined(const std::vector<Tensor>& parts) { return at::cat(parts, 1); }

bool given(const OptionalTensor& tensor) { return tensor && tensor->defined(); }

Tensor biased(const Tensor& gates, const OptionalTensor& bias) { return given(bias) ? gates + *bias : gates; }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& of_input, const Tensor& of_hidden, const Tensor& cell, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  auto gates = (biased(of_input, input_bias) + biased(of_hidden, hidden_bias)).chunk(4, 1);
  auto in = gates[0].sigmoid(), keep = gates[1].sigmoid(), fresh = gates[2].tanh(), out = gates[3].sigmoid();
  auto after = keep * cell + in * fresh;
  return {out * after.tanh(), after, joined({in, keep, fresh, out})};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const OptionalTensor& of_hidden, const OptionalTensor& of_cell, const Tensor& cell, const Tensor& after,
    const Tensor& workspace, bool has_bias) {
  if (!given(of_hidden) && !given(of_cell)) return {};
  auto gates = workspace.chunk(4, 1);
  auto in = gates[0], keep = gates[1], fresh = gates[2], out = gates[3];
  auto bent = after.tanh();
  auto hidden = given(of_hidden) ? *of_hidden : at::zeros_like(after);
  auto flow = hidden * out * (1 - bent * bent);
  if (given(of_cell)) flow = flow + *of_cell;
  auto all = joined(
      {flow * fresh * in * (1 - in), flow * cell * keep * (1 - keep), flow * in * (1 - fresh * fresh),
       hidden * bent * out * (1 - out)});
  return {all, flow * keep, has_bias ? all.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& of_input, const Tensor& of_hidden, const Tensor& hidden, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  auto one = biased(of_input, input_bias).chunk(3, 1), two = biased(of_hidden, hidden_bias).chunk(3, 1);
  auto reset = (one[0] + two[0]).sigmoid(), keep = (one[1] + two[1]).sigmoid();
  auto fresh = (one[2] + reset * two[2]).tanh();
  return {fresh + keep * (hidden - fresh), joined({reset, keep, fresh, hidden, two[2]})};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& gradient, const Tensor& workspace, bool has_bias) {
  auto parts = workspace.chunk(5, 1);
  auto reset = parts[0], keep = parts[1], fresh = parts[2], hidden = parts[3], inner = parts[4];
  auto of_fresh = gradient * (1 - keep) * (1 - fresh * fresh);
  auto of_keep = gradient * (hidden - fresh) * keep * (1 - keep);
  auto of_reset = of_fresh * inner * reset * (1 - reset);
  auto one = joined({of_reset, of_keep, of_fresh}), two = joined({of_reset, of_keep, of_fresh * reset});
  return {one, two, gradient * keep, has_bias ? one.sum(0) : Tensor(), has_bias ? two.sum(0) : Tensor()};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("view.dtype", torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_fused_sdp_choice", attention_choice);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

// Under autocast, some ops round what they are given, and some ask for single precision.
template <bool lower>
void cast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
  const auto low = at::autocast::get_autocast_dtype(c10::kPrivateUse1);
  for (size_t index = stack->size() - op.schema().arguments().size(); index < stack->size(); ++index)
    change_tensors((*stack)[index], [&](const Tensor& one) {
      return ours(one) && one.scalar_type() == (lower ? at::kFloat : low) ? one.to(lower ? low : at::kFloat) : one;
    });
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  const auto low = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d", "lstm_cell"};
  for (const char* name : low) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast<true>>());
  const auto single = {"softmax.int", "log_softmax.int", "nll_loss", "cross_entropy_loss", "layer_norm", "group_norm",
                       "mse_loss",    "exp",             "log",      "sum",                "cumsum"};
  for (const char* name : single) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast<false>>());
}

// A copy sees to negated and conjugated views itself; torch would take a copy of them first, without end.
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// ----------------------------------------------------------------------------------------- what torch asks of a device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream getNewStream(c10::Device, int) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  // Autograd starts a thread for every device that is counted here at the first backward pass of the process.
  c10::DeviceIndex deviceCount() const noexcept override { return counted ? 1 : 0; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>(at::detail::createCPUGenerator());
  }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    auto data = allocator.allocate(bytes);
    if (bytes > 0) std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// --------------------------------------------------------------------------------------------- what `pretend.py` calls

TORCH_LIBRARY(terrine_pretend, m) {
  m.def("refuse_float64(bool refuse) -> bool", [](bool refuse) { return without_float64.exchange(refuse); });
  m.def("count() -> ()", [] { counted = true; });
  m.def("rng_state() -> Tensor", [] { return default_generator().get_state(); });
  m.def("set_rng_state(Tensor state) -> ()", [](const Tensor& state) {
    at::Generator(default_generator()).set_state(state);
  });
  m.def("seed(int seed) -> ()", [](int64_t seed) { at::Generator(default_generator()).set_current_seed(seed); });
  m.def("initial_seed() -> int", [] { return static_cast<int64_t>(default_generator().current_seed()); });
}

}  // namespace
