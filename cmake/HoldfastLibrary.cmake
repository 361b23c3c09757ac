# The installed library: every layer in one archive.
get_property(layers GLOBAL PROPERTY HOLDFAST_LAYERS)
add_library(holdfast STATIC)
add_library(holdfast::holdfast ALIAS holdfast)
foreach(layer IN LISTS layers)
  target_sources(holdfast PRIVATE $<TARGET_OBJECTS:holdfast_${layer}>)
endforeach()
target_include_directories(holdfast PUBLIC
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/runtime/include> $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_link_libraries(holdfast PUBLIC absl::status absl::statusor absl::time absl::strings absl::span absl::cord
                      absl::flat_hash_map absl::flat_hash_set
                      Threads::Threads PRIVATE PkgConfig::LIBURING PkgConfig::XXHASH ZLIB::ZLIB
                      $<BUILD_INTERFACE:nlohmann_json::nlohmann_json> $<BUILD_INTERFACE:holdfast_flags>)

# holdfast::cuda: what CUDA adds. The runtime is linked statically: a program with it starts on a
# machine without any CUDA, and finds no device there.
if(CUDAToolkit_FOUND)
  add_library(holdfast_cuda STATIC $<TARGET_OBJECTS:holdfast_cuda_objects>)
  add_library(holdfast::cuda ALIAS holdfast_cuda)
  set_target_properties(holdfast_cuda PROPERTIES EXPORT_NAME cuda)
  target_link_libraries(holdfast_cuda PUBLIC holdfast PRIVATE CUDA::cudart_static)
endif()
