"""Image data sets as tensors: the embedded `mini`, CIFAR-10, CIFAR-100, folders of images, and arrays."""
