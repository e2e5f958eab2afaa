//! Sending a folder to the hub: the repository is made, large files go to its storage by the git-LFS protocol, and
//! one commit names them all (huggingface_hub `_commit_api.py`, `lfs.py`).

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::digest::sha256_of;
use super::error::HubError;
use super::http::{Answer, Call, HubClient, Payload};
use super::patterns::is_wanted;
use super::progress::TransferProgress;
use super::url::{origin, quote};
use crate::checkpoint::hub_cache::is_repo_id;

/// Files in one question (`_fetch_upload_modes`, `UPLOAD_BATCH_MAX_NUM_FILES`).
const BATCH: usize = 256;
/// Bytes that the hub looks at to tell text from data.
const SAMPLE: u64 = 512;
/// A regular file travels inside the commit; the hub takes none larger.
const LARGEST_REGULAR: u64 = 10 << 20;
const LFS_JSON: &str = "application/vnd.git-lfs+json";
/// Names that are large files by nature, used when the hub does not decide.
const LFS_SUFFIXES: [&str; 38] = [
    "safetensors",
    "bin",
    "gguf",
    "pt",
    "pth",
    "ckpt",
    "onnx",
    "npz",
    "npy",
    "h5",
    "tflite",
    "msgpack",
    "arrow",
    "parquet",
    "pickle",
    "pkl",
    "model",
    "tar",
    "tgz",
    "zip",
    "gz",
    "7z",
    "bz2",
    "xz",
    "zst",
    "mp3",
    "wav",
    "flac",
    "ogg",
    "mp4",
    "webm",
    "tif",
    "tiff",
    "png",
    "jpg",
    "jpeg",
    "webp",
    "wasm",
];

/// What to send.
#[derive(Clone, Debug, Default)]
pub struct UploadRequest {
    /// The folder.
    pub folder: PathBuf,
    /// `org/name`; made if it is not there.
    pub repo_id: String,
    /// Whether a new repository is private.
    pub private: bool,
    /// The branch; `main` when not given.
    pub revision: Option<String>,
    /// The commit's first line.
    pub message: Option<String>,
    /// Patterns of wanted files; all when there are none.
    pub include: Vec<String>,
    /// Patterns of unwanted files.
    pub exclude: Vec<String>,
}

/// What an upload did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Uploaded {
    /// Where the commit can be seen.
    pub url: String,
    /// The commit.
    pub commit: String,
    /// Files in it.
    pub files: usize,
    /// Bytes that were sent to the storage.
    pub transferred: u64,
}

struct Upload {
    path: String,
    source: PathBuf,
    size: u64,
    /// SHA-256, for a large file.
    oid: Option<String>,
}

impl HubClient {
    /// Sends a folder's files as one commit. Large files that the hub has already are not sent again, so that an
    /// upload that broke off goes on when it is called again.
    ///
    /// # Errors
    /// No token, nothing to send, or what the hub, the network or the disk said.
    pub fn upload(
        &self,
        request: &UploadRequest,
        progress: &dyn TransferProgress,
    ) -> Result<Uploaded, HubError> {
        if !is_repo_id(&request.repo_id) {
            return Err(HubError::BadRepoId { repo_id: request.repo_id.clone() });
        }
        if self.settings().offline {
            return Err(HubError::Offline { what: request.repo_id.clone() });
        }
        if self.settings().token.is_none() {
            return Err(HubError::NoToken);
        }
        let files = files_of(request)?;
        self.create(request)?;
        let mut files = self.sort_by_mode(request, files)?;
        for file in files.iter_mut().filter(|file| file.oid.is_some()) {
            if progress.is_cancelled() {
                return Err(HubError::Cancelled);
            }
            let failed = |cause| HubError::Io { doing: "read", path: file.source.clone(), cause };
            file.oid = Some(sha256_of(File::open(&file.source).map_err(failed)?).map_err(failed)?);
        }
        let large: Vec<&Upload> = files.iter().filter(|file| file.oid.is_some()).collect();
        progress.planned(large.len(), large.iter().map(|file| file.size).fold(0, u64::saturating_add));
        let mut transferred = 0;
        for batch in large.chunks(BATCH) {
            transferred += self.send_batch(request, batch, progress)?;
        }
        let (url, commit) = self.commit(request, &files)?;
        Ok(Uploaded { url, commit, files: files.len(), transferred })
    }

    fn post(
        &self,
        url: String,
        kind: &str,
        body: &[u8],
        action: &str,
        repeatable: bool,
    ) -> Result<Answer, HubError> {
        let call = Call {
            method: "POST",
            url,
            headers: vec![
                ("Content-Type".to_owned(), kind.to_owned()),
                ("Accept".to_owned(), kind.to_owned()),
            ],
            payload: Payload::Bytes(body),
            timeout: self.settings().download_timeout.max(self.settings().metadata_timeout),
            action,
        };
        self.send(&call, repeatable, &())
    }

    fn create(&self, request: &UploadRequest) -> Result<(), HubError> {
        let (organisation, name) = request.repo_id.split_once('/').unwrap_or_default();
        let body = json!({
            "type": "model", "name": name, "organization": organisation, "private": request.private,
        });
        let action = format!("creating {}", request.repo_id);
        let url = format!("{}/api/repos/create", self.settings().endpoint);
        match self.post(url, "application/json", body.to_string().as_bytes(), &action, true) {
            // It is there already.
            Ok(_) | Err(HubError::Status { status: 409, .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Asks which files are large ones; drops those that the repository ignores.
    fn sort_by_mode(&self, request: &UploadRequest, files: Vec<Upload>) -> Result<Vec<Upload>, HubError> {
        let action = format!("asking how to send the files to {}", request.repo_id);
        let url = format!(
            "{}/api/models/{}/preupload/{}",
            self.settings().endpoint,
            quote(&request.repo_id, true),
            quote(revision(request), false)
        );
        let mut modes: HashMap<String, (bool, bool)> = HashMap::new();
        for batch in files.chunks(BATCH) {
            let described = batch.iter().map(describe).collect::<Result<Vec<_>, _>>()?;
            let body = json!({"files": described}).to_string();
            let answer = self.post(url.clone(), "application/json", body.as_bytes(), &action, true)?;
            let answer = parse(&answer.text(&action)?, &action)?;
            for file in answer.get("files").and_then(Value::as_array).into_iter().flatten() {
                let Some(path) = file.get("path").and_then(Value::as_str) else { continue };
                let large = file.get("uploadMode").and_then(Value::as_str) == Some("lfs");
                let ignored = file.get("shouldIgnore").and_then(Value::as_bool) == Some(true);
                modes.insert(path.to_owned(), (large, ignored));
            }
        }
        let mut sorted = Vec::new();
        for mut file in files {
            let by_name = is_large(&file.path, file.size);
            let (large, ignored) = modes.get(&file.path).copied().unwrap_or((by_name, false));
            if ignored {
                continue;
            }
            // Filled in when it is hashed.
            file.oid = (large || file.size > LARGEST_REGULAR).then(String::new);
            sorted.push(file);
        }
        match sorted.is_empty() {
            true => Err(HubError::NothingToUpload(request.folder.clone())),
            false => Ok(sorted),
        }
    }

    /// Sends the large files that the storage does not have; returns how many bytes that were.
    fn send_batch(
        &self,
        request: &UploadRequest,
        files: &[&Upload],
        progress: &dyn TransferProgress,
    ) -> Result<u64, HubError> {
        let action = format!("asking where to send the files of {}", request.repo_id);
        let objects: Vec<Value> =
            files.iter().map(|file| json!({"oid": file.oid, "size": file.size})).collect();
        let body = json!({
            "operation": "upload", "transfers": ["basic", "multipart"], "hash_algo": "sha256",
            "ref": {"name": revision(request)}, "objects": objects,
        });
        let url = format!(
            "{}/{}.git/info/lfs/objects/batch",
            self.settings().endpoint,
            quote(&request.repo_id, true)
        );
        let answer = self.post(url, LFS_JSON, body.to_string().as_bytes(), &action, true)?;
        let answer = parse(&answer.text(&action)?, &action)?;
        let answered: HashMap<&str, &Value> = answer
            .get("objects")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(|object| Some((object.get("oid")?.as_str()?, object)))
            .collect();
        let mut transferred = 0;
        for file in files {
            let oid = file.oid.as_deref().unwrap_or_default();
            let malformed = |problem: String| HubError::Malformed { action: action.clone(), problem };
            let Some(object) = answered.get(oid) else {
                return Err(malformed(format!("nothing about `{}`", file.path)));
            };
            if let Some(message) = object.get("error").and_then(|error| error.get("message")) {
                return Err(malformed(format!("`{}` is refused: {message}", file.path)));
            }
            let Some(actions) = object.get("actions").filter(|actions| actions.is_object()) else {
                progress.advanced(file.size, false);
                progress.finished(&file.path);
                continue;
            };
            let upload =
                actions.get("upload").ok_or_else(|| malformed(format!("no address for `{}`", file.path)))?;
            self.send_file(file, upload, progress)?;
            if let Some(verify) = actions.get("verify").filter(|verify| verify.is_object()) {
                self.verify(file, verify)?;
            }
            transferred += file.size;
            progress.finished(&file.path);
        }
        Ok(transferred)
    }

    fn send_file(
        &self,
        file: &Upload,
        upload: &Value,
        progress: &dyn TransferProgress,
    ) -> Result<(), HubError> {
        let action = format!("sending {}", file.path);
        let malformed =
            |problem: &str| HubError::Malformed { action: action.clone(), problem: problem.to_owned() };
        let url = self.address(upload, &action)?;
        let header = upload.get("header").and_then(Value::as_object);
        let chunk = header.and_then(|header| header.get("chunk_size"));
        let Some(chunk) = chunk else {
            let extra = header.into_iter().flatten();
            let headers = extra.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())));
            self.put(file, &url, headers.collect(), 0, file.size, &action, progress)?;
            return Ok(());
        };
        let chunk = chunk.as_u64().or_else(|| chunk.as_str()?.parse().ok()).filter(|&chunk| chunk > 0);
        let chunk = chunk.ok_or_else(|| malformed("`chunk_size` is no size"))?;
        let mut parts: Vec<(u64, &str)> = header
            .into_iter()
            .flatten()
            .filter_map(|(number, url)| Some((number.parse().ok()?, url.as_str()?)))
            .collect();
        parts.sort_unstable();
        if parts.len() as u64 != file.size.div_ceil(chunk) {
            return Err(malformed("the number of parts does not fit the file"));
        }
        let mut sent = Vec::new();
        for (at, (number, url)) in parts.into_iter().enumerate() {
            let start = at as u64 * chunk;
            let length = chunk.min(file.size - start);
            let answer = self.put(file, url, Vec::new(), start, length, &action, progress)?;
            let etag = answer
                .headers
                .get("etag")
                .and_then(|etag| etag.to_str().ok())
                .filter(|etag| !etag.is_empty());
            let etag = etag.ok_or_else(|| malformed("a part was taken without an etag"))?;
            sent.push(json!({"partNumber": number, "etag": etag}));
        }
        let body = json!({"oid": file.oid, "parts": sent}).to_string();
        self.post(url, LFS_JSON, body.as_bytes(), &action, true).map(|_| ())
    }

    /// Sends a piece of a file; after a failure from its start again.
    fn put(
        &self,
        file: &Upload,
        url: &str,
        headers: Vec<(String, String)>,
        start: u64,
        length: u64,
        action: &str,
        progress: &dyn TransferProgress,
    ) -> Result<Answer, HubError> {
        let open = || -> io::Result<Box<dyn Read + '_>> {
            let mut handle = File::open(&file.source)?;
            handle.seek(SeekFrom::Start(start))?;
            Ok(Box::new(Sending { inner: handle.take(length), sent: 0, length, progress }))
        };
        let call = Call {
            method: "PUT",
            url: url.to_owned(),
            headers,
            payload: Payload::Stream { length, open: &open },
            timeout: self.settings().download_timeout,
            action,
        };
        self.send(&call, true, progress)
    }

    fn verify(&self, file: &Upload, verify: &Value) -> Result<(), HubError> {
        let action = format!("verifying {}", file.path);
        let url = self.address(verify, &action)?;
        let body = json!({"oid": file.oid, "size": file.size}).to_string();
        self.post(url, LFS_JSON, body.as_bytes(), &action, true).map(|_| ())
    }

    /// `href` of an action. Behind a mirror, addresses of the hub itself mean the mirror.
    fn address(&self, action: &Value, what: &str) -> Result<String, HubError> {
        let href = action.get("href").and_then(Value::as_str).unwrap_or_default();
        let url = href.replacen("https://huggingface.co", &self.settings().endpoint, 1);
        match origin(&url) {
            Some(_) => Ok(url),
            None => Err(HubError::Malformed {
                action: what.to_owned(),
                problem: format!("`{href}` is no web address"),
            }),
        }
    }

    /// One line of JSON for the commit, then one for each file. Sent once: a lost answer must not make two commits.
    fn commit(&self, request: &UploadRequest, files: &[Upload]) -> Result<(String, String), HubError> {
        let message = request.message.as_deref().unwrap_or("Upload with mlx-bun");
        let mut lines = vec![json!({"key": "header", "value": {"summary": message, "description": ""}})];
        for file in files {
            lines.push(match &file.oid {
                Some(oid) => json!({"key": "lfsFile",
                    "value": {"path": file.path, "algo": "sha256", "oid": oid, "size": file.size}}),
                None => {
                    let content = fs::read(&file.source).map_err(HubError::io("read", &file.source))?;
                    json!({"key": "file",
                        "value": {"path": file.path, "encoding": "base64", "content": STANDARD.encode(content)}})
                }
            });
        }
        let body: String = lines.iter().map(|line| format!("{line}\n")).collect();
        let action = format!("committing to {}", request.repo_id);
        let url = format!(
            "{}/api/models/{}/commit/{}",
            self.settings().endpoint,
            quote(&request.repo_id, true),
            quote(revision(request), false)
        );
        let answer = self.post(url, "application/x-ndjson", body.as_bytes(), &action, false)?;
        let answer = parse(&answer.text(&action)?, &action)?;
        let field = |name: &str| answer.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
        Ok((field("commitUrl"), field("commitOid")))
    }
}

/// Tells how much of a piece has gone, and takes it back when the piece is given up.
struct Sending<'a> {
    inner: io::Take<File>,
    sent: u64,
    length: u64,
    progress: &'a dyn TransferProgress,
}

impl Read for Sending<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.progress.is_cancelled() {
            return Err(io::Error::other("cancelled"));
        }
        let read = self.inner.read(buffer)?;
        if read == 0 && self.sent < self.length && !buffer.is_empty() {
            return Err(io::Error::other("the file became shorter while it was sent"));
        }
        self.sent += read as u64;
        self.progress.advanced(read as u64, true);
        Ok(read)
    }
}

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        if self.sent < self.length {
            self.progress.rewound(self.sent);
        }
    }
}

fn revision(request: &UploadRequest) -> &str {
    request.revision.as_deref().unwrap_or("main")
}

/// The folder's files, without git's and caches' own. Linked folders are not entered.
fn files_of(request: &UploadRequest) -> Result<Vec<Upload>, HubError> {
    let mut files = Vec::new();
    let mut folders = vec![request.folder.clone()];
    while let Some(folder) = folders.pop() {
        let failed = |cause| HubError::Io { doing: "read", path: folder.clone(), cause };
        for entry in fs::read_dir(&folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let source = entry.path();
            let kind = entry.file_type().map_err(failed)?;
            if kind.is_dir() {
                if !matches!(entry.file_name().to_str(), Some(".git" | ".cache")) {
                    folders.push(source);
                }
                continue;
            }
            let path = relative(&request.folder, &source);
            let Some(path) = path.filter(|path| is_wanted(path, &request.include, &request.exclude)) else {
                continue;
            };
            // A snapshot in the cache is made of links to its own blobs; its files are what is meant.
            let metadata = fs::metadata(&source).map_err(HubError::io("read", &source))?;
            if metadata.is_file() {
                files.push(Upload { path, source, size: metadata.len(), oid: None });
            }
        }
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    match files.is_empty() {
        true => Err(HubError::NothingToUpload(request.folder.clone())),
        false => Ok(files),
    }
}

fn relative(folder: &Path, file: &Path) -> Option<String> {
    let parts: Option<Vec<&str>> = file.strip_prefix(folder).ok()?.iter().map(|part| part.to_str()).collect();
    Some(parts?.join("/"))
}

fn describe(file: &Upload) -> Result<Value, HubError> {
    let mut sample = Vec::new();
    File::open(&file.source)
        .and_then(|handle| handle.take(SAMPLE).read_to_end(&mut sample))
        .map_err(HubError::io("read", &file.source))?;
    Ok(json!({"path": file.path, "sample": STANDARD.encode(sample), "size": file.size}))
}

fn is_large(path: &str, size: u64) -> bool {
    let suffix = Path::new(path).extension().and_then(|suffix| suffix.to_str()).unwrap_or_default();
    size >= LARGEST_REGULAR || LFS_SUFFIXES.contains(&suffix.to_ascii_lowercase().as_str())
}

fn parse(text: &[u8], action: &str) -> Result<Value, HubError> {
    serde_json::from_slice(text)
        .map_err(|error| HubError::Malformed { action: action.to_owned(), problem: error.to_string() })
}
