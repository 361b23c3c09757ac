# The archives: holdfast::holdfast, and holdfast_planted for tests.

# holdfast_archive(TARGET [PLANTED]): every layer in one archive, linked to what the layers name as LIBRARIES.
function(holdfast_archive target)
  get_property(layers GLOBAL PROPERTY HOLDFAST_LAYERS)
  holdfast_objects(objects LAYERS ${layers} ${ARGN})
  add_library(${target} STATIC ${objects})
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/runtime/include> $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_link_libraries(${target} PUBLIC ${HOLDFAST_PUBLIC_LIBRARIES} PRIVATE ${HOLDFAST_PRIVATE_LIBRARIES}
                        $<BUILD_INTERFACE:holdfast_flags>)
endfunction()

# What the layers need, sorted by how an installed package finds it: cmake/holdfastConfig.cmake.in and
# cmake/holdfast.pc.in look for the same.
get_property(libraries GLOBAL PROPERTY HOLDFAST_LIBRARIES)
list(APPEND libraries absl::span absl::status absl::statusor absl::time)  # The public headers'.
list(SORT libraries)
list(REMOVE_DUPLICATES libraries)
set(HOLDFAST_PUBLIC_LIBRARIES)
set(HOLDFAST_PRIVATE_LIBRARIES)
set(HOLDFAST_PC_REQUIRES)
set(packages
  "PkgConfig::LIBURING=liburing >= 2.3" "PkgConfig::ISAL=libisal >= 2.30" "PkgConfig::XXHASH=libxxhash >= 0.8.1" "ZLIB::ZLIB=zlib" "Threads::Threads=" "dl=")
foreach(library IN LISTS libraries)
  if(library MATCHES "^absl::(.*)")
    list(APPEND HOLDFAST_PUBLIC_LIBRARIES ${library})
    list(APPEND HOLDFAST_PC_REQUIRES absl_${CMAKE_MATCH_1})
  elseif(library STREQUAL "nlohmann_json::nlohmann_json")
    list(APPEND HOLDFAST_PRIVATE_LIBRARIES $<BUILD_INTERFACE:${library}>)  # Headers that no public header includes.
  else()
    set(found FALSE)
    foreach(package IN LISTS packages)
      if(package MATCHES "^${library}=(.*)")
        set(found TRUE)
        list(APPEND HOLDFAST_PRIVATE_LIBRARIES ${library})
        list(APPEND HOLDFAST_PC_REQUIRES ${CMAKE_MATCH_1})
      endif()
    endforeach()
    if(NOT found)
      message(FATAL_ERROR "Say in HoldfastLibrary.cmake how an installed holdfast finds ${library}")
    endif()
  endif()
endforeach()
list(JOIN HOLDFAST_PC_REQUIRES " " HOLDFAST_PC_REQUIRES)

holdfast_archive(holdfast)
add_library(holdfast::holdfast ALIAS holdfast)

# The same with the planted bugs, which are chosen at run time. Built only for a test that asks for it.
if(HOLDFAST_TESTS)
  holdfast_archive(holdfast_planted PLANTED)
  set_target_properties(holdfast_planted PROPERTIES EXCLUDE_FROM_ALL TRUE)
endif()
