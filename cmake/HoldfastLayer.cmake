# holdfast_layer(NAME [PLANTED] SOURCES a.cc ... USES layer ... [LIBRARIES target ...])
#
# One object library per layer. USES names the layers that it may include; the include rules themselves are checked by
# tests/tidy (the compiler sees the whole tree). PLANTED: the layer has bugs under HOLDFAST_PLANTED_BUGS that tests turn
# on to prove that they would find them; it is compiled a second time, with them, for the tests alone.
function(holdfast_layer name)
  cmake_parse_arguments(LAYER "PLANTED;BELOW" "" "SOURCES;USES;LIBRARIES" ${ARGN})
  holdfast_layer_objects(holdfast_${name} "" ${ARGN})
  if(HOLDFAST_SANITIZE AND NOT LAYER_BELOW)
    target_precompile_headers(holdfast_${name} REUSE_FROM holdfast_headers)
  endif()
  set_property(GLOBAL APPEND PROPERTY HOLDFAST_LAYERS ${name})
  set_property(GLOBAL APPEND PROPERTY HOLDFAST_LIBRARIES ${LAYER_LIBRARIES})
  if(LAYER_PLANTED AND HOLDFAST_TESTS)
    holdfast_layer_objects(holdfast_${name}_planted HOLDFAST_PLANTED_BUGS=1 ${ARGN})
    set_target_properties(holdfast_${name}_planted PROPERTIES EXCLUDE_FROM_ALL TRUE)
    target_compile_options(holdfast_${name}_planted PRIVATE ${holdfast_light_options})
    set_property(GLOBAL APPEND PROPERTY HOLDFAST_PLANTED ${name})
  endif()
endfunction()

# holdfast_below(NAME ...): as holdfast_layer, for code below the fork line. No exceptions, no RTTI, no guards around
# function-local statics: nothing there may allocate or lock.
function(holdfast_below name)
  holdfast_layer(${name} BELOW ${ARGN})
  foreach(target holdfast_${name} holdfast_${name}_planted)
    if(TARGET ${target})
      target_compile_options(${target} PRIVATE -fno-exceptions -fno-rtti -fno-threadsafe-statics
                             -fno-asynchronous-unwind-tables)
    endif()
  endforeach()
  set_property(GLOBAL APPEND PROPERTY HOLDFAST_BELOW ${name})
endfunction()

function(holdfast_layer_objects target definition)
  cmake_parse_arguments(LAYER "PLANTED;BELOW" "" "SOURCES;USES;LIBRARIES" ${ARGN})
  add_library(${target} OBJECT ${LAYER_SOURCES})
  target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/runtime/include)
  target_link_libraries(${target} PRIVATE holdfast_flags PUBLIC ${LAYER_LIBRARIES})
  foreach(used IN LISTS LAYER_USES)
    target_link_libraries(${target} PUBLIC holdfast_${used})
  endforeach()
  if(definition)
    target_compile_definitions(${target} PRIVATE ${definition})
  endif()
endfunction()

# holdfast_objects(OUT LAYERS layer ... [PLANTED]): the layers' objects, planted ones where there are any.
function(holdfast_objects out)
  cmake_parse_arguments(OBJECTS "PLANTED" "" "LAYERS" ${ARGN})
  set(result)
  foreach(layer IN LISTS OBJECTS_LAYERS)
    set(target holdfast_${layer})
    if(OBJECTS_PLANTED AND TARGET holdfast_${layer}_planted)
      set(target holdfast_${layer}_planted)
    endif()
    list(APPEND result $<TARGET_OBJECTS:${target}>)
  endforeach()
  set(${out} ${result} PARENT_SCOPE)
endfunction()

# The libraries' headers, compiled once for all layers above the fork line. Only under a sanitizer: in every other build a
# file must bring what it uses.
if(HOLDFAST_SANITIZE)
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/headers.cc CONTENT "")  # Written once: what is built of it stays.
  add_library(holdfast_headers OBJECT ${PROJECT_BINARY_DIR}/headers.cc)
  target_link_libraries(holdfast_headers PRIVATE holdfast_flags)
  target_precompile_headers(holdfast_headers PRIVATE <algorithm> <functional> <memory> <string> <vector>
                            <absl/container/inlined_vector.h> <absl/status/statusor.h> <absl/strings/str_cat.h>
                            <absl/strings/str_format.h> <absl/time/time.h>)
endif()
