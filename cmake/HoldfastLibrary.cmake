# The archives: holdfast::holdfast, holdfast::cuda, and holdfast_planted for tests.

# holdfast_archive(TARGET [PLANTED]): every layer in one archive.
function(holdfast_archive target)
  get_property(layers GLOBAL PROPERTY HOLDFAST_LAYERS)
  holdfast_objects(objects LAYERS ${layers} ${ARGN})
  add_library(${target} STATIC ${objects})
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/runtime/include> $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_link_libraries(${target} PUBLIC absl::status absl::statusor absl::time absl::strings absl::span absl::cord
                        Threads::Threads PRIVATE PkgConfig::LIBURING PkgConfig::XXHASH ZLIB::ZLIB
                        $<BUILD_INTERFACE:nlohmann_json::nlohmann_json> $<BUILD_INTERFACE:holdfast_flags>)
endfunction()

holdfast_archive(holdfast)
add_library(holdfast::holdfast ALIAS holdfast)

# The same with the planted bugs, which are chosen at run time. Built only for a test that asks for it.
if(HOLDFAST_TESTS)
  holdfast_archive(holdfast_planted PLANTED)
  set_target_properties(holdfast_planted PROPERTIES EXCLUDE_FROM_ALL TRUE)
endif()

# holdfast::cuda: what CUDA adds. The runtime is linked statically: a program with it starts on a
# machine without any CUDA, and finds no device there.
if(CUDAToolkit_FOUND)
  add_library(holdfast_cuda STATIC $<TARGET_OBJECTS:holdfast_cuda_objects>)
  add_library(holdfast::cuda ALIAS holdfast_cuda)
  set_target_properties(holdfast_cuda PROPERTIES EXPORT_NAME cuda)
  target_link_libraries(holdfast_cuda PUBLIC holdfast PRIVATE CUDA::cudart_static)
endif()
