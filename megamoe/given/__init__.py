"""What a launch at a door is given: arrays, tensor maps, parameters, the name of a kernel; knows the contract alone."""
