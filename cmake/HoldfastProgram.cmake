# Everything that an installation has in bin and libexec.
add_custom_target(programs)

# holdfast_program(NAME SOURCES a.cc ... [LIBRARIES target ...]): a program for people, installed to bin.
function(holdfast_program name)
  cmake_parse_arguments(PROGRAM "" "" "SOURCES;LIBRARIES" ${ARGN})
  add_executable(${name} ${PROGRAM_SOURCES})
  target_link_libraries(${name} PRIVATE holdfast_flags holdfast ${PROGRAM_LIBRARIES})
  target_compile_options(${name} PRIVATE ${holdfast_light_options})
  # The spawn launcher looks for the worker beside the program.
  add_dependencies(${name} holdfast-worker)
  add_dependencies(programs ${name})
  install(TARGETS ${name} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endfunction()

# holdfast_worker_program(NAME SOURCES a.cc ... [PLANTED]): the spawned helper, from the layers below the fork line and
# nothing else. It is started for every save, so the dynamic linker shall have little to do: libraries that it does not
# use (libstdc++) are not loaded.
function(holdfast_worker_program name)
  cmake_parse_arguments(PROGRAM "PLANTED" "" "SOURCES" ${ARGN})
  get_property(below GLOBAL PROPERTY HOLDFAST_BELOW)
  if(PROGRAM_PLANTED)
    holdfast_objects(objects LAYERS ${below} PLANTED)
  else()
    holdfast_objects(objects LAYERS ${below})
  endif()
  add_executable(${name} ${PROGRAM_SOURCES} ${objects})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/runtime/include)
  target_compile_definitions(${name} PRIVATE HOLDFAST_VERSION="${PROJECT_VERSION}")
  target_compile_options(${name} PRIVATE -fno-exceptions -fno-rtti -fno-threadsafe-statics)
  target_link_libraries(${name} PRIVATE holdfast_flags PkgConfig::LIBURING PkgConfig::XXHASH Threads::Threads)
  target_link_options(${name} PRIVATE -Wl,--as-needed -static-libgcc)
  if(PROGRAM_PLANTED)
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL TRUE)
  else()
    add_dependencies(programs ${name})
    install(TARGETS ${name} RUNTIME DESTINATION ${CMAKE_INSTALL_LIBEXECDIR}/holdfast)
  endif()
endfunction()
