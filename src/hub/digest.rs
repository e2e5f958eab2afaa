//! A file's name on the hub is its hash: SHA-256 of the bytes for large files, git's blob hash for the rest.

use std::fs::File;
use std::io::{self, Read};

use sha1::Sha1;
use sha2::{Digest, Sha256};

const BUFFER: usize = 1 << 20;

/// What a file's bytes must hash to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ContentId {
    hex: String,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Sha256,
    GitSha1,
}

impl ContentId {
    /// SHA-256 in hexadecimal digits.
    pub fn sha256(hex: &str) -> Option<Self> {
        Self::checked(hex, 64, Kind::Sha256)
    }

    /// git's hash of a blob in hexadecimal digits.
    pub fn git_sha1(hex: &str) -> Option<Self> {
        Self::checked(hex, 40, Kind::GitSha1)
    }

    fn checked(hex: &str, digits: usize, kind: Kind) -> Option<Self> {
        let valid = hex.len() == digits && hex.bytes().all(|byte| byte.is_ascii_hexdigit());
        valid.then(|| Self { hex: hex.to_ascii_lowercase(), kind })
    }

    /// The hash, which is also the blob's file name.
    pub fn hex(&self) -> &str {
        &self.hex
    }

    /// A hash of the same kind; `size` is the whole file's.
    pub(super) fn hasher(&self, size: u64) -> Hasher {
        match self.kind {
            Kind::Sha256 => Hasher::Sha256(Sha256::new()),
            Kind::GitSha1 => Hasher::GitSha1(Sha1::new().chain_update(format!("blob {size}\0"))),
        }
    }

    /// Whether the file has these bytes.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn is_of(&self, mut file: File) -> io::Result<bool> {
        let mut hasher = self.hasher(file.metadata()?.len());
        hasher.feed(&mut file)?;
        Ok(hasher.hex() == self.hex)
    }
}

/// SHA-256 of a whole file, in hexadecimal digits.
///
/// # Errors
/// It cannot be read.
pub(super) fn sha256_of(mut file: File) -> io::Result<String> {
    let mut hasher = Hasher::Sha256(Sha256::new());
    hasher.feed(&mut file)?;
    Ok(hasher.hex())
}

pub(super) enum Hasher {
    Sha256(Sha256),
    GitSha1(Sha1),
}

impl Hasher {
    pub(super) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::GitSha1(hasher) => hasher.update(bytes),
        }
    }

    /// Hashes the rest of a file; returns how many bytes that was.
    pub(super) fn feed(&mut self, file: &mut File) -> io::Result<u64> {
        let mut buffer = vec![0; BUFFER];
        let mut total = 0;
        loop {
            match file.read(&mut buffer)? {
                0 => return Ok(total),
                read => {
                    self.update(&buffer[..read]);
                    total += read as u64;
                }
            }
        }
    }

    pub(super) fn hex(self) -> String {
        let digits = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        match self {
            Self::Sha256(hasher) => digits(&hasher.finalize()),
            Self::GitSha1(hasher) => digits(&hasher.finalize()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file(content: &[u8]) -> File {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(content).unwrap();
        file.reopen().unwrap()
    }

    #[test]
    fn hashes_are_those_of_git_and_sha256sum() {
        // `git hash-object` and `sha256sum` of these bytes.
        let git = ContentId::git_sha1("ce013625030ba8dba906f756967f9e9ca394464a").unwrap();
        assert!(git.is_of(file(b"hello\n")).unwrap());
        assert!(!git.is_of(file(b"hello")).unwrap());
        let empty = ContentId::git_sha1("e69de29bb2d1d6434b8b29ae775ad8c2e48c5391").unwrap();
        assert!(empty.is_of(file(b"")).unwrap());
        let sha = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        assert!(ContentId::sha256(&sha.to_uppercase()).unwrap().is_of(file(b"hello\n")).unwrap());
        assert_eq!(sha256_of(file(b"hello\n")).unwrap(), sha);
    }

    #[test]
    fn only_hashes_are_names() {
        for bad in ["", "../../../../etc/passwd", "5891", &"g".repeat(40), &"a".repeat(41)] {
            assert_eq!(ContentId::git_sha1(bad), None, "{bad}");
            assert_eq!(ContentId::sha256(bad), None, "{bad}");
        }
    }
}
