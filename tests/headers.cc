// Nothing: an object that the headers of the tests are compiled with once (CMakeLists.txt).
