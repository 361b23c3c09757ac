// Where a state's tensors lie in memory and which of them overlap, read from many tensors at once.
#include <dlfcn.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <compare>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "bindings.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace holdfast::python {
namespace {

/// A strided view that spans this many times its own bytes is saved as a contiguous copy.
constexpr uint64_t kSpanMax = 2;

// The part of DLPack's exchange interface (dlpack.h, version 1.3) that describes a tensor without a
// reference to it.

struct DlDevice {
  static constexpr int32_t kCpu = 1;
  static constexpr int32_t kCpuPinned = 3;
  int32_t type = kCpu;
  int32_t index = 0;

  auto operator<=>(const DlDevice&) const = default;
};

struct DlTensor {
  void* data;
  DlDevice device;
  int32_t rank;
  uint32_t dtype;
  const int64_t* shape;
  const int64_t* strides;  // null: row-major
  uint64_t byte_offset;
};

struct DlExchange {
  uint32_t major_version;
  uint32_t minor_version;
  const void* previous;
  const void* unused[3];
  int (*describe)(void* tensor, DlTensor* described);  // may be null
  const void* current_stream;
};

/// Everything of a tensor but its address and dimensions.
struct Row {
  PyObject* dtype = nullptr;  // torch has one object for each; DLPack has one for several
  DlDevice device;
  uint32_t rank = 0;
  uint64_t bytes = 0;  // of the elements
  uint64_t span = 0;   // from the first element to the end of the last
  bool requires_grad = false;
  bool lazy = false;  // conjugated or negated when read
  bool contiguous = true;

  bool operator==(const Row&) const = default;
};

/// Memory that overlapping tensors share.
struct Memory {
  uint64_t begin = 0;
  uint64_t end = 0;
};

/// Sizes and strides of a tensor, for which memory is taken beforehand.
constexpr size_t kDimensionsUsual = 4;

/// The attributes that are read, by interned names.
struct Names {
  /// They live as long as the process.
  static const Names& Get() {
    static const auto* const names = new Names;
    return *names;
  }

  nb::object data_ptr = Interned("data_ptr");
  nb::object shape = Interned("shape");
  nb::object stride = Interned("stride");
  nb::object dtype = Interned("dtype");
  nb::object dlpack_device = Interned("__dlpack_device__");
  nb::object is_cpu = Interned("is_cpu");
  nb::object requires_grad = Interned("requires_grad");
  nb::object is_conj = Interned("is_conj");
  nb::object is_neg = Interned("is_neg");
  nb::object is_neg_of_plain = nb::module_::import_("torch").attr("Tensor").attr("is_neg");
  nb::object storage_of_plain =
      nb::module_::import_("torch").attr("Tensor").attr("untyped_storage");
  nb::object offset_of_plain = nb::module_::import_("torch").attr("Tensor").attr("storage_offset");
  nb::object storage_bytes = nb::module_::import_("torch").attr("UntypedStorage").attr("nbytes");
  nb::object itemsize = Interned("itemsize");
  nb::object implementation = Interned("_cdata");

  static nb::object Interned(const char* name) {
    return nb::steal(PyUnicode_InternFromString(name));
  }
};

bool IsTrue(const nb::object& value) { return value.ptr() == Py_True; }

/// Calls an unbound method, which is faster than to look for it in the object.
nb::object Call(const nb::object& method, nb::handle self) {
  PyObject* const argument = self.ptr();
  nb::object result = nb::steal(PyObject_Vectorcall(method.ptr(), &argument, 1, nullptr));
  if (!result.is_valid()) throw nb::python_error();
  return result;
}

/// Two calls of PyTorch's C interface: what a storage has, and where a tensor begins in it. A
/// handle is the address of a pointer to a tensor's implementation. Null where PyTorch lacks them.
struct StorageCalls {
  using Call = int32_t (*)(void* const* handle, int64_t* result);  // 0: success
  Call bytes = nullptr;
  Call offset = nullptr;  // in elements

  static const StorageCalls& Get() {
    static const StorageCalls calls = [] {
      StorageCalls found;
      void* const library = ::dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
      if (library == nullptr) return found;
      found.bytes = reinterpret_cast<Call>(::dlsym(library, "aoti_torch_get_storage_size"));
      found.offset = reinterpret_cast<Call>(::dlsym(library, "aoti_torch_get_storage_offset"));
      return found;
    }();
    return calls;
  }
};

/// \threadsafety The GIL must be held.
class TensorTable {
 public:
  explicit TensorTable(const nb::list& tensors) {
    const Names& names = Names::Get();
    rows_.reserve(nb::len(tensors));
    addresses_.reserve(nb::len(tensors));
    dimensions_.reserve(nb::len(tensors) * kDimensionsUsual);
    for (const nb::handle tensor : tensors) {
      UseType(tensor.type());
      UseDtype(tensor.attr(names.dtype), names);
      Row row;
      row.dtype = dtype_;
      row.requires_grad = IsTrue(tensor.attr(names.requires_grad));
      row.lazy = IsNegative(tensor, names) || (is_complex_ && IsTrue(tensor.attr(names.is_conj)()));
      const bool is_described = AddDescribed(tensor, row);
      if (!is_described) AddByAttributes(tensor, row, names);
      try {
        CheckStorage(tensor, is_described, names);
      } catch (const nb::python_error&) {
        if (is_plain_) throw;  // A subclass may wrap tensors, and have no storage.
      }
    }
  }

  /// Whether both have tensors of equal dtypes, devices, shapes and strides.
  bool IsLike(const TensorTable& other) const {
    return rows_ == other.rows_ && dimensions_ == other.dimensions_;
  }

  /// Whether both are like each other, and their tensors overlap alike.
  bool Equals(TensorTable* other) {
    if (!IsLike(*other)) return false;
    if (addresses_ == other->addresses_) {
      group_of_ = other->group_of_;
      groups_ = other->groups_;
      return true;
    }
    Group();
    other->Group();
    if (group_of_ != other->group_of_) return false;
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (Offset(i) != other->Offset(i)) return false;
    }
    return true;
  }

  /// Indices of tensors that must be copied: lazily changed ones, and views that span much more
  /// memory than they have elements.
  std::vector<uint32_t> Copied() const {
    std::vector<uint32_t> copied;
    for (size_t i = 0; i < rows_.size(); ++i) {
      const Row& row = rows_[i];
      if (row.lazy || (!row.contiguous && row.span > kSpanMax * row.bytes))
        copied.push_back(static_cast<uint32_t>(i));
    }
    return copied;
  }

  /// (begin, end, indices of the tensors) of each run of memory, in the tensors' order. A tensor
  /// without elements is alone.
  nb::list Groups() {
    Group();
    std::vector<nb::list> members(groups_.size());
    for (size_t i = 0; i < rows_.size(); ++i) members[group_of_[i]].append(i);
    nb::list groups;
    for (size_t g = 0; g < groups_.size(); ++g)
      groups.append(nb::make_tuple(groups_[g].begin, groups_[g].end, members[g]));
    return groups;
  }

  /// Returns address and bytes of each tensor that is contiguous in host memory and not lazily
  /// changed, zeros for each other one, and the indices of the others.
  nb::tuple InHost() const {
    std::vector<uint64_t> addresses(rows_.size());
    std::vector<uint64_t> bytes(rows_.size());
    std::vector<size_t> others;
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (!rows_[i].contiguous || rows_[i].lazy || rows_[i].device != DlDevice()) {
        others.push_back(i);
      } else {
        addresses[i] = addresses_[i];
        bytes[i] = rows_[i].bytes;
      }
    }
    return nb::make_tuple(addresses, bytes, others);
  }

  std::vector<uint64_t> Addresses() {
    Group();
    std::vector<uint64_t> begins(groups_.size());
    for (size_t g = 0; g < groups_.size(); ++g) begins[g] = groups_[g].begin;
    return begins;
  }

 private:
  bool IsNegative(nb::handle tensor, const Names& names) const {
    if (!is_plain_) return IsTrue(tensor.attr(names.is_neg)());
    return IsTrue(Call(names.is_neg_of_plain, tensor));
  }

  /// Finds the exchange interface of a type. Most tensors have the type of the one before.
  void UseType(nb::handle type) {
    if (type.ptr() == type_) return;
    type_ = type.ptr();
    exchange_ = nullptr;
    // Subclasses inherit the attribute, and may be more than their memory.
    is_plain_ = type.is(torch_.attr("Tensor")) || type.is(torch_.attr("nn").attr("Parameter"));
    const nb::object capsule =
        is_plain_ ? nb::getattr(type, "__dlpack_c_exchange_api__", nb::none()) : nb::none();
    if (capsule.is_none()) return;
    const auto* const found =
        static_cast<const DlExchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (found == nullptr) PyErr_Clear();
    if (found != nullptr && found->major_version == 1 && found->describe != nullptr)
      exchange_ = found;
  }

  void UseDtype(const nb::object& dtype, const Names& names) {
    if (dtype.ptr() == dtype_) return;
    dtype_ = dtype.ptr();
    item_bytes_ = nb::cast<uint64_t>(dtype.attr(names.itemsize));
    is_complex_ = IsTrue(dtype.attr("is_complex"));
  }

  /// Returns false for a tensor that the exchange interface cannot describe.
  bool AddDescribed(nb::handle tensor, Row row) {
    DlTensor described;
    if (exchange_ == nullptr) return false;
    if (exchange_->describe(tensor.ptr(), &described) != 0) {
      PyErr_Clear();
      return false;
    }
    if (described.strides == nullptr && described.rank != 0) return false;
    row.device = described.device;
    if (row.device.type == DlDevice::kCpuPinned) row.device = {};
    row.rank = static_cast<uint32_t>(described.rank);
    for (const int64_t* const sizes : {described.shape, described.strides}) {
      for (uint32_t d = 0; d < row.rank; ++d)
        dimensions_.push_back(static_cast<uint64_t>(sizes[d]));
    }
    Measure(&row);
    Append(row, reinterpret_cast<uint64_t>(described.data) + described.byte_offset);
    return true;
  }

  void AddByAttributes(nb::handle tensor, Row row, const Names& names) {
    if (!IsTrue(tensor.attr(names.is_cpu))) {
      const nb::object device = tensor.attr(names.dlpack_device)();
      row.device = {.type = nb::cast<int32_t>(nb::int_(device[0])),
                    .index = nb::cast<int32_t>(nb::int_(device[1]))};
    }
    row.rank = AppendSizes(tensor.attr(names.shape));
    AppendSizes(tensor.attr(names.stride)());
    Measure(&row);
    Append(row, row.bytes == 0 ? 0 : nb::cast<uint64_t>(tensor.attr(names.data_ptr)()));
  }

  /// Throws for a tensor whose storage was freed, or ends before the tensor's elements.
  void CheckStorage(nb::handle tensor, bool is_described, const Names& names) const {
    const Row& row = rows_.back();
    if (row.bytes == 0) return;
    uint64_t there = 0;
    uint64_t offset = 0;
    if (!is_described || !AskStorage(tensor, names, &there, &offset)) {
      const nb::object storage = Call(names.storage_of_plain, tensor);
      there = nb::cast<uint64_t>(Call(names.storage_bytes, storage));
      offset = nb::cast<uint64_t>(Call(names.offset_of_plain, tensor));
    }
    if (offset * item_bytes_ + row.span > there)
      throw nb::value_error("a tensor's storage ends before its elements");
  }

  /// Asks without Python's objects, which take half of the time of a repeated save. Returns false
  /// where PyTorch lacks the calls.
  bool AskStorage(nb::handle tensor, const Names& names, uint64_t* there, uint64_t* offset) const {
    const StorageCalls& calls = StorageCalls::Get();
    if (calls.bytes == nullptr || calls.offset == nullptr) return false;
    const auto implementation = nb::cast<uintptr_t>(tensor.attr(names.implementation));
    void* const pointer = reinterpret_cast<void*>(implementation);
    int64_t found[2] = {};
    if (calls.bytes(&pointer, &found[0]) != 0 || calls.offset(&pointer, &found[1]) != 0)
      return false;
    *there = static_cast<uint64_t>(found[0]);
    *offset = static_cast<uint64_t>(found[1]);
    return true;
  }

  uint32_t AppendSizes(const nb::object& sizes) {
    const auto count = static_cast<uint32_t>(nb::len(sizes));
    for (uint32_t i = 0; i < count; ++i)
      dimensions_.push_back(static_cast<uint64_t>(nb::cast<int64_t>(sizes[i])));
    return count;
  }

  /// Derives what shape and strides, the last of the dimensions, say of the memory.
  void Measure(Row* row) const {
    const uint64_t* const shape = dimensions_.data() + dimensions_.size() - size_t{2} * row->rank;
    const uint64_t* const strides = shape + row->rank;
    uint64_t elements = 1;
    uint64_t last = 0;
    for (uint32_t d = row->rank; d-- > 0;) {
      last += (shape[d] - 1) * strides[d];
      if (shape[d] != 1 && strides[d] != elements) row->contiguous = false;
      elements *= shape[d];
    }
    row->bytes = elements * item_bytes_;
    if (elements == 0) {
      row->contiguous = true;
    } else {
      row->span = (last + 1) * item_bytes_;
    }
  }

  void Append(const Row& row, uint64_t address) {
    addresses_.push_back(row.bytes == 0 ? 0 : address);
    rows_.push_back(row);
  }

  uint64_t Offset(size_t i) const { return addresses_[i] - groups_[group_of_[i]].begin; }

  /// Finds the groups, if that has not been done.
  void Group() {
    if (!group_of_.empty() || rows_.empty()) return;
    std::vector<uint32_t> order(rows_.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [this](uint32_t a, uint32_t b) {
      return std::pair(rows_[a].device, addresses_[a]) < std::pair(rows_[b].device, addresses_[b]);
    });
    // By the lowest index of each, which names the group until all are numbered.
    std::vector<uint32_t> first(rows_.size());
    std::vector<Memory> memory(rows_.size());
    size_t run = 0;
    for (size_t k = 0; k < order.size();) {
      run = k;
      const Row& row = rows_[order[k]];
      Memory group{.begin = addresses_[order[k]], .end = addresses_[order[k]] + row.span};
      uint32_t lowest = order[k++];
      while (row.span != 0 && k < order.size() && rows_[order[k]].device == row.device &&
             addresses_[order[k]] < group.end) {
        group.end = std::max(group.end, addresses_[order[k]] + rows_[order[k]].span);
        lowest = std::min(lowest, order[k++]);
      }
      for (; run < k; ++run) first[order[run]] = lowest;
      memory[lowest] = group;
    }
    std::vector<uint32_t> number(rows_.size());
    group_of_.resize(rows_.size());
    for (uint32_t i = 0; i < rows_.size(); ++i) {
      if (first[i] == i) {
        number[i] = static_cast<uint32_t>(groups_.size());
        groups_.push_back(memory[i]);
      }
      group_of_[i] = number[first[i]];
    }
  }

  std::vector<Row> rows_;
  std::vector<uint64_t> dimensions_;  // of each tensor its shape, then its strides
  std::vector<uint64_t> addresses_;
  const nb::module_ torch_ = nb::module_::import_("torch");
  PyObject* type_ = nullptr;  // of the last tensor
  bool is_plain_ = false;
  const DlExchange* exchange_ = nullptr;
  PyObject* dtype_ = nullptr;  // of the last tensor
  uint64_t item_bytes_ = 0;
  bool is_complex_ = false;
  std::vector<uint32_t> group_of_;
  std::vector<Memory> groups_;
};

}  // namespace

void BindTensors(nb::module_& module) {
  nb::class_<TensorTable>(module, "TensorTable",
                          "What torch says of strided tensors, without their values.")
      .def(nb::init<const nb::list&>(), "tensors"_a,
           "ValueError: the storage of one ends before its elements.")
      .def(
          "equals", [](TensorTable& self, TensorTable& other) { return self.Equals(&other); },
          "other"_a, "Whether all but the addresses of the groups is equal: tensors overlap alike.")
      .def("is_like", &TensorTable::IsLike, "other"_a, "Whether all but the addresses is equal.")
      .def("copied", &TensorTable::Copied, "Indices of tensors that must be copied to be saved.")
      .def("in_host", &TensorTable::InHost,
           "Addresses and bytes of what is contiguous in host memory as it reads, zeros for the\n"
           "others, and the indices of the others.")
      .def("groups", &TensorTable::Groups,
           "(begin, end, indices) of each run of memory, in the tensors' order.")
      .def("addresses", &TensorTable::Addresses, "Where each group begins.");
}

}  // namespace holdfast::python
