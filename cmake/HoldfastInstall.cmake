# What `cmake --install` puts where: headers, archives, the CMake package and the pkg-config file. Programs install
# themselves (holdfast_program).
include(CMakePackageConfigHelpers)

set(holdfast_package_directory ${CMAKE_INSTALL_LIBDIR}/cmake/holdfast)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/runtime/include/holdfast DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

install(TARGETS holdfast EXPORT holdfastTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT holdfastTargets NAMESPACE holdfast:: DESTINATION ${holdfast_package_directory})

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/holdfastConfig.cmake.in
  ${PROJECT_BINARY_DIR}/holdfastConfig.cmake INSTALL_DESTINATION ${holdfast_package_directory}
  PATH_VARS CMAKE_INSTALL_LIBEXECDIR)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/holdfastConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/holdfastConfig.cmake ${PROJECT_BINARY_DIR}/holdfastConfigVersion.cmake
  DESTINATION ${holdfast_package_directory})

# The prefix is taken from the place of the .pc file itself, so that an installation can be moved.
file(RELATIVE_PATH holdfast_pc_to_prefix /p/${CMAKE_INSTALL_LIBDIR}/pkgconfig /p)
configure_file(${CMAKE_CURRENT_LIST_DIR}/holdfast.pc.in ${PROJECT_BINARY_DIR}/holdfast.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/holdfast.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
