"""Why a build is as it is: which pass, layer or matrix costs what; builds compared and repeated."""
