"""Writes ustar.tar, pax.tar and gnu.tar, and to members.txt what examples/tar.c prints of them, in
this order: size, sum of the bytes and name of each file. There are folders between them, and names
of up to 240 bytes. links.tar has a file and a link."""
import io
import tarfile

with open("members.txt", "w", encoding="utf-8") as listed:
    for name, form in (("ustar", tarfile.USTAR_FORMAT), ("pax", tarfile.PAX_FORMAT),
                       ("gnu", tarfile.GNU_FORMAT)):
        with tarfile.open(name + ".tar", "w", format=form) as tar:
            for i in range(700):
                data = bytes((i * 7 + k) % 251 for k in range(i * 37 % 2100))
                path = f"d/{i}.bin"
                if i % 5 == 0:
                    path = "x" * 90 + "/" + path
                if i % 7 == 0 and form != tarfile.USTAR_FORMAT:
                    path = "y" * 140 + "é" + path
                member = tarfile.TarInfo(path)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
                print(len(data), sum(data), path, file=listed)
                if i % 50 == 0:
                    member = tarfile.TarInfo("folder" + "/long" * (40 if name == "gnu" else 4))
                    member.type = tarfile.DIRTYPE
                    tar.addfile(member)

with tarfile.open("links.tar", "w") as tar:
    tar.addfile(tarfile.TarInfo("file"))
    member = tarfile.TarInfo("link")
    member.type = tarfile.SYMTYPE
    member.linkname = "file"
    tar.addfile(member)
