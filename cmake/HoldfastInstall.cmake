# What `cmake --install` puts where: headers, archives, the CMake package and the pkg-config files. Programs install
# themselves (holdfast_program).
include(CMakePackageConfigHelpers)

set(holdfast_package_directory ${CMAKE_INSTALL_LIBDIR}/cmake/holdfast)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/runtime/include/holdfast DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

install(TARGETS holdfast EXPORT holdfastTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT holdfastTargets NAMESPACE holdfast:: DESTINATION ${holdfast_package_directory})
if(CUDAToolkit_FOUND)
  # An export of its own, so that a project without CUDA never looks for it.
  install(TARGETS holdfast_cuda EXPORT holdfastCudaTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(EXPORT holdfastCudaTargets NAMESPACE holdfast:: DESTINATION ${holdfast_package_directory})
endif()

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/holdfastConfig.cmake.in
  ${PROJECT_BINARY_DIR}/holdfastConfig.cmake INSTALL_DESTINATION ${holdfast_package_directory}
  PATH_VARS CMAKE_INSTALL_LIBEXECDIR)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/holdfastConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/holdfastConfig.cmake ${PROJECT_BINARY_DIR}/holdfastConfigVersion.cmake
  DESTINATION ${holdfast_package_directory})

# The prefix is taken from the place of the .pc file itself, so that an installation can be moved.
file(RELATIVE_PATH holdfast_pc_to_prefix /p/${CMAKE_INSTALL_LIBDIR}/pkgconfig /p)
set(names holdfast)
if(CUDAToolkit_FOUND)
  list(APPEND names holdfast-cuda)
endif()
foreach(name IN LISTS names)
  configure_file(${CMAKE_CURRENT_LIST_DIR}/${name}.pc.in ${PROJECT_BINARY_DIR}/${name}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()
