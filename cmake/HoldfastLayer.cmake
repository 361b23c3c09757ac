# holdfast_layer(NAME SOURCES a.cc ... USES layer ... [LIBRARIES target ...])
#
# One object library per layer. USES names the layers that it may include; the include rules themselves are checked by
# tests/tidy (the compiler sees the whole tree).
function(holdfast_layer name)
  cmake_parse_arguments(LAYER "" "" "SOURCES;USES;LIBRARIES" ${ARGN})
  add_library(holdfast_${name} OBJECT ${LAYER_SOURCES})
  target_include_directories(holdfast_${name} PUBLIC ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/runtime/include)
  target_link_libraries(holdfast_${name} PRIVATE holdfast_flags PUBLIC ${LAYER_LIBRARIES})
  foreach(used IN LISTS LAYER_USES)
    target_link_libraries(holdfast_${name} PUBLIC holdfast_${used})
  endforeach()
  set_property(GLOBAL APPEND PROPERTY HOLDFAST_LAYERS ${name})
endfunction()

# holdfast_below(NAME ...): as holdfast_layer, for code below the fork line. No exceptions, no RTTI, no guards around
# function-local statics: nothing there may allocate or lock.
function(holdfast_below name)
  holdfast_layer(${name} ${ARGN})
  target_compile_options(holdfast_${name} PRIVATE -fno-exceptions -fno-rtti -fno-threadsafe-statics
                         -fno-asynchronous-unwind-tables)
  set_property(GLOBAL APPEND PROPERTY HOLDFAST_BELOW ${name})
endfunction()
