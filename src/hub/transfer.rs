//! One file from the hub to the disk: resumed where an earlier try ended, checked against its hash, renamed when
//! it is whole.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use ureq::http::HeaderMap;

use super::digest::Hasher;
use super::error::HubError;
use super::http::{Answer, Call, HubClient, Payload};
use super::listing::{RepoFile, RepoListing};
use super::lock::{Locked, Sharing, try_lock};
use super::progress::TransferProgress;
use super::url::quote;

const BUFFER: usize = 256 << 10;

/// Where a file goes.
pub(super) struct Place {
    /// The file.
    pub target: PathBuf,
    /// Where it grows.
    pub incomplete: PathBuf,
    /// Whoever has this lock may write it.
    pub lock: PathBuf,
}

/// What one connection brought.
enum Stream {
    /// The file is whole, or at least longer than before.
    Progress(Option<String>),
    /// Nothing, and why.
    Nothing(String),
}

/// A file that grows.
struct Partial<'a> {
    file: File,
    path: &'a Path,
    hasher: Hasher,
    have: u64,
    /// Whether its bytes come from more than one answer.
    pieced: bool,
}

impl HubClient {
    /// Downloads one file to its place. Another process that has the lock is an error.
    pub(super) fn fetch(
        &self,
        listing: &RepoListing,
        file: &RepoFile,
        place: &Place,
        progress: &dyn TransferProgress,
    ) -> Result<(), HubError> {
        for path in [&place.target, &place.incomplete] {
            let folder = path.parent().unwrap_or(Path::new("."));
            fs::create_dir_all(folder).map_err(HubError::io("create", folder))?;
        }
        let _lock =
            match try_lock(&place.lock, Sharing::Exclusive).map_err(HubError::io("lock", &place.lock))? {
                Locked::Mine(lock) => lock,
                Locked::Theirs(holder) => return Err(HubError::Busy { file: file.path.clone(), holder }),
            };
        let mut partial = open_partial(file, &place.incomplete)?;
        progress.advanced(partial.have, false);
        let mut restarted = false;
        while !self.complete(listing, file, &mut partial, progress)? {
            // What an earlier process left may be broken; bytes of one answer are what the hub has.
            if !partial.pieced || std::mem::replace(&mut restarted, true) {
                drop(partial);
                fs::remove_file(&place.incomplete).map_err(HubError::io("remove", &place.incomplete))?;
                return Err(HubError::Mismatch { file: file.path.clone() });
            }
            progress.rewound(partial.have);
            partial.restart(file)?;
        }
        partial.file.sync_all().map_err(HubError::io("write", &place.incomplete))?;
        drop(partial);
        fs::rename(&place.incomplete, &place.target).map_err(HubError::io("write", &place.target))
    }

    /// Fills the file up; says whether its bytes are the right ones.
    fn complete(
        &self,
        listing: &RepoListing,
        file: &RepoFile,
        partial: &mut Partial,
        progress: &dyn TransferProgress,
    ) -> Result<bool, HubError> {
        // A server that ignores ranges sends the same beginning again and again: only bytes beyond all earlier
        // ones count as progress.
        let (mut idle, mut best) = (0, partial.have);
        while partial.have < file.size {
            let cause = match self.stream(listing, file, partial, progress)? {
                Stream::Progress(_) if partial.have == file.size => break,
                Stream::Progress(cause) => {
                    partial.pieced = true;
                    cause.unwrap_or_else(|| "the connection ended".to_owned())
                }
                Stream::Nothing(cause) => cause,
            };
            idle = if partial.have > best { 1 } else { idle + 1 };
            best = best.max(partial.have);
            if idle >= self.settings().retry.tries {
                let (file, have, size) = (file.path.clone(), partial.have, file.size);
                return Err(HubError::Short { file, have, size, cause });
            }
            self.wait(idle, None, progress)?;
        }
        Ok(partial.digest(file)? == file.id.hex())
    }

    /// Takes what one connection gives.
    fn stream(
        &self,
        listing: &RepoListing,
        file: &RepoFile,
        partial: &mut Partial,
        progress: &dyn TransferProgress,
    ) -> Result<Stream, HubError> {
        let range = format!("bytes={}-", partial.have);
        let headers = (partial.have > 0).then(|| ("Range".to_owned(), range)).into_iter().collect();
        let action = format!("downloading {}", file.path);
        let call = Call {
            method: "GET",
            url: format!(
                "{}/{}/resolve/{}/{}",
                self.settings().endpoint,
                quote(&listing.repo_id, true),
                listing.commit,
                quote(&file.path, true)
            ),
            headers,
            payload: Payload::None,
            timeout: self.settings().download_timeout,
            action: &action,
        };
        let answer = match self.send(&call, true, progress) {
            Ok(answer) => answer,
            // The file ends before what we have, which is less than listed.
            Err(HubError::Status { status: 416, .. }) if partial.have > 0 => {
                let (listed, sent) = (file.size, partial.have);
                return Err(HubError::WrongLength { file: file.path.clone(), listed, sent });
            }
            Err(error) => return Err(error),
        };
        check_etag(file, &answer.first_headers)?;
        if partial.have > 0 && !continues(&answer, partial.have) {
            progress.rewound(partial.have);
            partial.restart(file)?;
        }
        check_length(file, &answer, partial.have)?;
        partial.fill(answer, file, progress)
    }
}

fn open_partial<'a>(file: &RepoFile, path: &'a Path) -> Result<Partial<'a>, HubError> {
    let failed = |doing| HubError::io(doing, path);
    let mut handle = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .map_err(failed("create"))?;
    if handle.metadata().map_err(failed("read"))?.len() > file.size {
        handle.set_len(0).map_err(failed("write"))?;
    }
    let mut hasher = file.id.hasher(file.size);
    let have = hasher.feed(&mut handle).map_err(failed("read"))?;
    Ok(Partial { file: handle, path, hasher, have, pieced: have > 0 })
}

impl Partial<'_> {
    /// Throws away what there is.
    fn restart(&mut self, file: &RepoFile) -> Result<(), HubError> {
        self.file
            .set_len(0)
            .and_then(|()| self.file.seek(SeekFrom::Start(0)))
            .map_err(HubError::io("write", self.path))?;
        self.hasher = file.id.hasher(file.size);
        self.have = 0;
        self.pieced = false;
        Ok(())
    }

    /// The hash of the whole file.
    fn digest(&mut self, file: &RepoFile) -> Result<String, HubError> {
        let hasher = std::mem::replace(&mut self.hasher, file.id.hasher(file.size));
        Ok(hasher.hex())
    }

    /// Appends an answer's body.
    fn fill(
        &mut self,
        answer: Answer,
        file: &RepoFile,
        progress: &dyn TransferProgress,
    ) -> Result<Stream, HubError> {
        let mut body = answer.body.into_reader();
        let mut buffer = vec![0; BUFFER];
        let before = self.have;
        let cause = loop {
            if progress.is_cancelled() {
                return Err(HubError::Cancelled);
            }
            let read = match body.read(&mut buffer) {
                Ok(0) => break None,
                Ok(read) => read,
                Err(error) => break Some(error.to_string()),
            };
            let left = file.size - self.have;
            if read as u64 > left {
                return Err(HubError::WrongLength {
                    file: file.path.clone(),
                    listed: file.size,
                    sent: self.have + read as u64,
                });
            }
            self.file.write_all(&buffer[..read]).map_err(HubError::io("write", self.path))?;
            self.hasher.update(&buffer[..read]);
            self.have += read as u64;
            progress.advanced(read as u64, true);
            if self.have == file.size {
                break None;
            }
        };
        Ok(match self.have > before {
            true => Stream::Progress(cause),
            false => Stream::Nothing(cause.unwrap_or_else(|| "the connection ended".to_owned())),
        })
    }
}

/// Whether an answer goes on at this byte.
fn continues(answer: &Answer, have: u64) -> bool {
    answer.status == 206 && content_range(&answer.headers).is_some_and(|(start, _)| start == have)
}

/// First byte and total of `Content-Range: bytes 5-9/10`; the total may be unknown.
fn content_range(headers: &HeaderMap) -> Option<(u64, Option<u64>)> {
    let value = headers.get("content-range")?.to_str().ok()?.trim().strip_prefix("bytes ")?;
    let (range, total) = value.split_once('/')?;
    Some((range.split_once('-')?.0.trim().parse().ok()?, total.trim().parse().ok()))
}

/// A longer body than listed is another file; a shorter one may be a connection that breaks.
fn check_length(file: &RepoFile, answer: &Answer, have: u64) -> Result<(), HubError> {
    let wrong = |sent| HubError::WrongLength { file: file.path.clone(), listed: file.size, sent };
    if let Some((_, Some(total))) = content_range(&answer.headers).filter(|_| answer.status == 206)
        && total != file.size
    {
        return Err(wrong(total));
    }
    match answer.body.content_length().map(|length| have.saturating_add(length)) {
        Some(sent) if sent > file.size => Err(wrong(sent)),
        _ => Ok(()),
    }
}

/// The endpoint says in `X-Linked-Etag` (large files) or `ETag` which blob it is about to send.
fn check_etag(file: &RepoFile, headers: &HeaderMap) -> Result<(), HubError> {
    let tag = headers.get("x-linked-etag").or_else(|| headers.get("etag"));
    let Some(tag) = tag.and_then(|tag| tag.to_str().ok()) else { return Ok(()) };
    let tag = tag.trim().trim_start_matches("W/").trim_matches('"');
    let comparable = tag.len() == file.id.hex().len() && tag.bytes().all(|byte| byte.is_ascii_hexdigit());
    match comparable && !tag.eq_ignore_ascii_case(file.id.hex()) {
        true => Err(HubError::Changed { file: file.path.clone() }),
        false => Ok(()),
    }
}
