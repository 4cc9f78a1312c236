"""The data sets known by name: their files, sizes, classes and statistics. Imports nothing, for a quick start."""

from dataclasses import dataclass

SITE = "https://www.cs.toronto.edu/~kriz/"
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class Spec:
    """One data set. Stems are file names without `.bin`, which only the binary layout has."""

    description: str
    train_stems: tuple[str, ...] = ("train",)
    test_stem: str = "test"
    train_count: int = 50_000
    test_count: int = 10_000
    classes: tuple[str, ...] = CIFAR10_CLASSES
    mean: tuple[float, float, float] = (0.4914, 0.4822, 0.4465)
    std: tuple[float, float, float] = (0.2470, 0.2435, 0.2616)
    side: int = 32
    label_bytes: int = 1  # the last of them is the label
    labels_key: str = "labels"  # in the pickled layout
    binary_folder: str = ""
    pickled_folder: str = ""
    names_file: str = ""  # one class name per line, in the binary layout
    url: str = ""
    md5: str = ""

    @property
    def stems(self) -> tuple[str, ...]:
        return (*self.train_stems, self.test_stem)

    @property
    def archive(self) -> str:
        return self.url.rsplit("/", 1)[-1]


SPECS = {
    "mini": Spec("6,500 CIFAR-10 images averaged to 16x16, embedded", train_count=5_500, test_count=1_000, side=16),
    "cifar10": Spec(
        "CIFAR-10, 60,000 images of 32x32 in 10 classes",
        train_stems=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test_stem="test_batch",
        binary_folder="cifar-10-batches-bin",
        pickled_folder="cifar-10-batches-py",
        names_file="batches.meta.txt",
        url=SITE + "cifar-10-binary.tar.gz",
        md5="c32a1d4ab5d03f1284b67883e8d87530",
    ),
    "cifar100": Spec(
        "CIFAR-100, 60,000 images of 32x32 in 100 classes",
        classes=tuple(f"class {number}" for number in range(100)),
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        label_bytes=2,
        labels_key="fine_labels",
        binary_folder="cifar-100-binary",
        pickled_folder="cifar-100-python",
        names_file="fine_label_names.txt",
        url=SITE + "cifar-100-binary.tar.gz",
        md5="03b5dce01913d631647c71ecec9e9cb8",
    ),
}
