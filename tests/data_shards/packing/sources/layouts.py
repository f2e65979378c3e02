"""Small sets in exactly the layouts that the real ones are published in: names, nesting, formats."""

import io
import pickle
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.io import savemat

SYNSETS = ("n01440764", "n01443537", "n02085620")


def jpeg(seed: int, mode: str = "RGB", format: str = "JPEG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (9, 11, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, format=format)
    return buffer.getvalue()


def tar_bytes(files: Mapping[str, bytes], *, folders: bool = False) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in dict.fromkeys(name.rpartition("/")[0] for name in files if folders and "/" in name):
            entry = tarfile.TarInfo(name)
            entry.type = tarfile.DIRTYPE
            tar.addfile(entry)
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def write_tar(path: Path, files: Mapping[str, bytes]) -> Path:
    """Gzipped, if its name says so."""
    import gzip

    data = tar_bytes(files, folders=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.name.endswith(("gz", "tgz")) else data)
    return path


def write_files(root: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


# ---- ImageNet


def imagenet_train() -> dict[str, bytes]:
    """CLASS/FILE, as unpacked; a PNG and a CMYK image among them, as in the real set."""
    files = {f"{synset}/{synset}_{i}.JPEG": jpeg(10 * k + i) for k, synset in enumerate(SYNSETS) for i in (7, 10, 3)}
    files["n02085620/n02085620_3.JPEG"] = jpeg(1, "CMYK")
    files["n01443537/n01443537_3.JPEG"] = jpeg(2, format="PNG")
    return files


def class_tars(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The same as the tars of the classes, which hold no folder."""
    classes = dict.fromkeys(name.partition("/")[0] for name in files)
    return {
        f"{name}.tar": tar_bytes(
            {path.partition("/")[2]: data for path, data in files.items() if path.startswith(name)}
        )
        for name in sorted(classes, reverse=True)
    }


def imagenet_val() -> tuple[dict[str, bytes], list[str]]:
    """Flat files, and their synsets in the order of the names."""
    files = {f"ILSVRC2012_val_{number:08d}.JPEG": jpeg(100 + number) for number in range(1, 7)}
    return files, [SYNSETS[i] for i in (2, 0, 1, 1, 0, 2)]


def devkit(synsets: list[str]) -> dict[str, bytes]:
    """meta.mat numbers the synsets in an order of its own, and has inner nodes too."""
    numbers = {"n02085620": 1, "n01440764": 2, "n01443537": 3}
    rows = [(number, synset, f"words {synset}", "gloss", 0, np.zeros(0), 0, 1300) for synset, number in numbers.items()]
    rows.append((4, "n00001740", "entity", "gloss", 3, np.array([1.0, 2.0, 3.0]), 5, 0))
    kinds = (
        "ILSVRC2012_ID",
        "WNID",
        "words",
        "gloss",
        "num_children",
        "children",
        "wordnet_height",
        "num_train_images",
    )
    table = np.empty((len(rows), 1), dtype=[(name, object) for name in kinds])
    for i, row in enumerate(rows):
        table[i, 0] = row
    truth = "".join(f"{numbers[synset]}\n" for synset in synsets)
    return {
        "ILSVRC2012_devkit_t12/data/meta.mat": mat(synsets=table),
        "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt": truth.encode(),
        "ILSVRC2012_devkit_t12/readme.txt": b"...",
    }


def kaggle_csv(names: list[str], synsets: list[str]) -> bytes:
    lines = [f"{name.partition('.')[0]},{synset} 1 2 3 4 " for name, synset in zip(names, synsets, strict=True)]
    lines[0] += f"{synsets[0]} 5 6 7 8 "  # several boxes
    return "\n".join(["ImageId,PredictionString", *reversed(lines)]).encode()


def mat(**values: Any) -> bytes:
    buffer = io.BytesIO()
    savemat(buffer, values, format="5", do_compression=True)
    return buffer.getvalue()


# ---- CIFAR


class OfPython2:
    """A pickle as Python 2's cPickle writes CIFAR's, opcode by opcode: text is byte strings, numpy by its old name."""

    def __init__(self) -> None:
        self.data = bytearray(b"\x80\x02")

    def add(self, value: Any) -> None:
        match value:
            case dict():
                self.data += b"}("
                for key, each in value.items():
                    self.add(key)
                    self.add(each)
                self.data += b"u"
            case list():
                self.data += b"]("
                for each in value:
                    self.add(each)
                self.data += b"e"
            case bytes() if len(value) < 256:
                self.data += b"U" + bytes([len(value)]) + value
            case bytes():
                self.data += b"T" + len(value).to_bytes(4, "little") + value
            case int():
                self.data += b"J" + value.to_bytes(4, "little", signed=True)
            case np.ndarray():
                self.data += b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
                self.data += b"(K\x01("
                for side in value.shape:
                    self.add(side)
                self.data += (
                    b"tcnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
                )
                self.data += b"\x89"
                self.add(value.tobytes())
                self.data += b"tb"

    def done(self) -> bytes:
        return bytes(self.data) + b"."


def python2_pickle(value: Any) -> bytes:
    writer = OfPython2()
    writer.add(value)
    return writer.done()


def cifar10(images: int = 4) -> dict[str, bytes]:
    """cifar-10-batches-py/, `images` in each batch."""
    draw = np.random.default_rng(0)
    files = {}
    for batch in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        content = {
            b"batch_label": batch.encode(),
            b"labels": draw.integers(0, 10, images).tolist(),
            b"data": draw.integers(0, 256, (images, 3072), dtype=np.uint8),
            b"filenames": [f"{batch}_{i}.png".encode() for i in range(images)],
        }
        files[f"cifar-10-batches-py/{batch}"] = python2_pickle(content)
    names = b"airplane automobile bird cat deer dog frog horse ship truck".split()
    meta = {b"num_cases_per_batch": images, b"label_names": names, b"num_vis": 3072}
    return {
        "cifar-10-batches-py/batches.meta": python2_pickle(meta),
        **files,
        "cifar-10-batches-py/readme.html": b"<html>",
    }


def cifar100(images: int = 12) -> dict[str, bytes]:
    draw = np.random.default_rng(1)
    files = {}
    for part in ("train", "test"):
        content = {
            b"fine_labels": [0, *draw.integers(0, 100, images - 1).tolist()],
            b"coarse_labels": [0, *draw.integers(0, 20, images - 1).tolist()],
            b"data": draw.integers(0, 256, (images, 3072), dtype=np.uint8),
            b"filenames": [f"{part}_{i}.png".encode() for i in range(images)],
            b"batch_label": part.encode(),
        }
        files[f"cifar-100-python/{part}"] = python2_pickle(content)
    meta = {
        b"fine_label_names": [f"fine{i}".encode() for i in range(100)],
        b"coarse_label_names": [f"coarse{i}".encode() for i in range(20)],
    }
    return {"cifar-100-python/meta": python2_pickle(meta), **files}


def binary(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The binary version of the same images; written with the standard library's pickle, which these come from."""
    made: dict[str, bytes] = {}
    for path, data in files.items():
        name = path.rpartition("/")[2]
        if name == "readme.html":
            continue
        content = pickle.loads(data, encoding="bytes")
        if b"data" in content:
            labels = [content[key] for key in (b"labels", b"coarse_labels", b"fine_labels") if key in content]
            rows = [bytes(each) + row.tobytes() for *each, row in zip(*labels, content[b"data"], strict=True)]
            made[f"{name}.bin"] = b"".join(rows)
        for key, file in (
            (b"label_names", "batches.meta.txt"),
            *((f"{k}_label_names".encode(), f"{k}_label_names.txt") for k in ("fine", "coarse")),
        ):
            if key in content:
                made[file] = b"\n".join(content[key]) + b"\n\n"
    folder = "cifar-10-batches-bin" if any("cifar-10-" in path for path in files) else "cifar-100-binary"
    return {f"{folder}/{name}": data for name, data in made.items()}


# ---- Oxford


def pets() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """images/ and annotations/; breeds are numbered regardless of case, cats are capitalised."""
    breeds = ("Abyssinian", "american_bulldog", "Birman")
    images: dict[str, bytes] = {}
    lines: dict[str, list[str]] = {"trainval": [], "test": []}
    for number, breed in enumerate(breeds, start=1):
        for i in (100, 2, 33, 4):
            images[f"images/{breed}_{i}.jpg"] = jpeg(1000 * number + i)
            lines["test" if i == 33 else "trainval"].append(f"{breed}_{i} {number} {1 + breed.islower()} 1")
    images["images/Abyssinian_100.mat"] = b"MATLAB 5.0"
    images["images/Abyssinian_5.jpg"] = jpeg(5)  # in no list
    lists = {f"annotations/{name}.txt": "\n".join([*rows, ""]).encode() for name, rows in lines.items()}
    header = "#Image CLASS-ID SPECIES BREED ID\n"
    lists["annotations/list.txt"] = (header + "\n".join(lines["trainval"] + lines["test"])).encode()
    return images, {**lists, "annotations/trimaps/._Abyssinian_100.png": b"x"}


def flowers(count: int = 306) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """jpg/, and the two .mat files: all 102 classes in each split."""
    draw = np.random.default_rng(0)
    labels = np.concatenate([draw.permutation(102) + 1 for _ in range(count // 102)])
    ids = np.arange(1, count + 1)
    images = {f"jpg/image_{i:05d}.jpg": jpeg(i) for i in ids.tolist()}
    thirds = {name: ids[part * 102 : (part + 1) * 102][::-1] for part, name in enumerate(("tstid", "trnid", "valid"))}
    return images, {
        "imagelabels.mat": mat(labels=labels.astype(np.uint8)[None]),
        "setid.mat": mat(**{name: each.astype(np.uint16)[None] for name, each in thirds.items()}),
    }
