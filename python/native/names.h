// Names of the file system and messages, which need not be UTF-8, as Python's text.
#ifndef HOLDFAST_PYTHON_NATIVE_NAMES_H_
#define HOLDFAST_PYTHON_NATIVE_NAMES_H_

#include <nanobind/nanobind.h>

#include <string>
#include <utility>
#include <vector>

namespace holdfast::python {

/// A path, or the name of a file or directory. Python's text is that of os.fsdecode: any byte
/// survives both ways.
struct Name {
  std::string text;
};

/// Text for people. Bytes that are not UTF-8 become escapes in Python, so that any stream takes
/// them; so do Python's lone surrogates here.
struct Message {
  std::string text;
};

inline std::vector<Name> NamesOf(std::vector<std::string> texts) {
  std::vector<Name> names;
  names.reserve(texts.size());
  for (std::string& text : texts) names.push_back({std::move(text)});
  return names;
}

inline std::vector<Message> MessagesOf(std::vector<std::string> texts) {
  std::vector<Message> messages;
  messages.reserve(texts.size());
  for (std::string& text : texts) messages.push_back({std::move(text)});
  return messages;
}

/// Moves the content of `bytes`, a new reference or null with an exception set, to `*text`. Returns
/// false and drops the exception for null.
inline bool TakeBytes(PyObject* bytes, std::string* text) {
  if (bytes == nullptr) {
    PyErr_Clear();
    return false;
  }
  text->assign(PyBytes_AsString(bytes), static_cast<size_t>(PyBytes_Size(bytes)));
  Py_DECREF(bytes);
  return true;
}

}  // namespace holdfast::python

namespace nanobind::detail {

template <>
struct type_caster<holdfast::python::Name> {
  NB_TYPE_CASTER(holdfast::python::Name, const_name("str"))

  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    return PyUnicode_Check(source.ptr()) &&
           holdfast::python::TakeBytes(PyUnicode_EncodeFSDefault(source.ptr()), &value.text);
  }
  static handle from_cpp(const holdfast::python::Name& name, rv_policy, cleanup_list*) noexcept {
    return PyUnicode_DecodeFSDefaultAndSize(name.text.data(),
                                            static_cast<Py_ssize_t>(name.text.size()));
  }
};

template <>
struct type_caster<holdfast::python::Message> {
  NB_TYPE_CASTER(holdfast::python::Message, const_name("str"))

  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    return PyUnicode_Check(source.ptr()) &&
           holdfast::python::TakeBytes(
               PyUnicode_AsEncodedString(source.ptr(), "utf-8", "backslashreplace"), &value.text);
  }
  static handle from_cpp(const holdfast::python::Message& message, rv_policy,
                         cleanup_list*) noexcept {
    return PyUnicode_DecodeUTF8(message.text.data(), static_cast<Py_ssize_t>(message.text.size()),
                                "backslashreplace");
  }
};

}  // namespace nanobind::detail

#endif  // HOLDFAST_PYTHON_NATIVE_NAMES_H_
