//! A stand-in for the Hugging Face hub: a small HTTP server that keeps repositories in memory, speaks the parts of
//! the hub's API that are used here, writes down every request, and misbehaves on demand.

#![allow(dead_code)] // each test program uses a part of it

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest, Sha256};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub const OTHER_COMMIT: &str = "89abcdef0123456789abcdef0123456789abcdef";

/// What to do to one request instead of answering it well.
#[derive(Clone, Debug)]
pub enum Fault {
    /// An error, with headers.
    Status(u16, Vec<(&'static str, String)>),
    /// Send so many bytes of the body and hang up.
    CutAfter(usize),
    /// Claim another length and send the body as it is.
    Length(usize),
    /// Answer a ranged request with the whole file.
    IgnoreRange,
    /// The same, and hang up after so many bytes.
    IgnoreRangeAndCut(usize),
    /// Send other bytes of the same length.
    Corrupt,
    /// Send this instead.
    Body(Vec<u8>),
    /// Name another blob in the headers.
    Etag(String),
    /// Send so many bytes, then wait.
    StallAfter(usize, Duration),
    /// So many bytes at a time, with a pause in between.
    Slow(usize, Duration),
    /// Answer well.
    Pass,
}

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Seen {
    pub method: String,
    pub path: String,
    pub headers: HashMap<String, String>,
    pub body: Vec<u8>,
}

impl Seen {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

#[derive(Clone, Debug)]
pub struct RemoteFile {
    pub bytes: Vec<u8>,
    /// Whether it is stored as a large file, named by SHA-256 and served by the other host.
    pub lfs: bool,
    sha256: String,
    git_sha1: String,
}

#[derive(Default)]
struct State {
    /// Commit of each revision of each repository.
    revisions: HashMap<(String, String), String>,
    files: HashMap<(String, String), BTreeMap<String, RemoteFile>>,
    faults: HashMap<String, VecDeque<Fault>>,
    /// A fault for every request of a path, after the queue.
    always: HashMap<String, Fault>,
    seen: Vec<Seen>,
    /// Where large files are: the address of the other host.
    storage: Option<String>,
    objects: HashMap<String, Vec<u8>>,
    part_size: Option<usize>,
    parts: HashMap<String, BTreeMap<usize, Vec<u8>>>,
    /// Sizes in listings that are not true.
    listed_sizes: HashMap<String, u64>,
    token: Option<String>,
}

/// One server.
#[derive(Clone)]
pub struct StandIn {
    pub address: String,
    state: Arc<Mutex<State>>,
}

impl StandIn {
    /// A hub whose large files are on a second host.
    pub fn start() -> (Self, Self) {
        let state = Arc::new(Mutex::new(State::default()));
        // Two addresses of this machine are two hosts to a client.
        let hub = Self::listen("127.0.0.1", Arc::clone(&state));
        let storage = Self::listen("localhost", Arc::new(Mutex::new(State::default())));
        hub.lock().storage = Some(storage.address.clone());
        (hub, storage)
    }

    fn listen(host: &str, state: Arc<Mutex<State>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{host}:{}", listener.local_addr().unwrap().port());
        let server = Self { address, state };
        let worker = server.clone();
        thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let worker = worker.clone();
                thread::spawn(move || worker.serve(connection));
            }
        });
        server
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Puts a file into `main` of a repository.
    pub fn add(&self, storage: &StandIn, repo: &str, path: &str, bytes: &[u8], lfs: bool) {
        self.add_at(storage, repo, COMMIT, path, bytes, lfs);
        self.lock().revisions.insert((repo.to_owned(), "main".to_owned()), COMMIT.to_owned());
    }

    pub fn add_at(&self, storage: &StandIn, repo: &str, commit: &str, path: &str, bytes: &[u8], lfs: bool) {
        let file =
            RemoteFile { bytes: bytes.to_vec(), lfs, sha256: sha256(bytes), git_sha1: git_sha1(bytes) };
        let mut state = self.lock();
        state.revisions.insert((repo.to_owned(), commit.to_owned()), commit.to_owned());
        state.files.entry((repo.to_owned(), commit.to_owned())).or_default().insert(path.to_owned(), file);
        drop(state);
        if lfs {
            storage.lock().objects.insert(sha256(bytes), bytes.to_vec());
        }
    }

    pub fn name_revision(&self, repo: &str, revision: &str, commit: &str) {
        self.lock().revisions.insert((repo.to_owned(), revision.to_owned()), commit.to_owned());
    }

    /// Queues faults for a path; each is for one request.
    pub fn faults(&self, path: &str, faults: impl IntoIterator<Item = Fault>) {
        self.lock().faults.entry(path.to_owned()).or_default().extend(faults);
    }

    /// A fault for every request of a path.
    pub fn always(&self, path: &str, fault: Fault) {
        self.lock().always.insert(path.to_owned(), fault);
    }

    pub fn forgive(&self) {
        let mut state = self.lock();
        state.faults.clear();
        state.always.clear();
    }

    pub fn lie_about_size(&self, path: &str, size: u64) {
        self.lock().listed_sizes.insert(path.to_owned(), size);
    }

    /// Only requests with this token are answered.
    pub fn require_token(&self, token: &str) {
        self.lock().token = Some(token.to_owned());
    }

    /// Large files are to be uploaded in parts of this size.
    pub fn part_size(&self, size: usize) {
        self.lock().part_size = Some(size);
    }

    /// The requests so far.
    pub fn seen(&self) -> Vec<Seen> {
        self.lock().seen.clone()
    }

    pub fn forget(&self) {
        self.lock().seen.clear();
    }

    /// Batch requests say that these bytes are there already.
    pub fn remember_object(&self, bytes: &[u8]) {
        self.lock().objects.insert(sha256(bytes), bytes.to_vec());
    }

    /// Uploaded large files by hash.
    pub fn objects(&self) -> HashMap<String, Vec<u8>> {
        self.lock().objects.clone()
    }

    fn serve(&self, stream: TcpStream) {
        let _ = stream.set_read_timeout(Some(Duration::from_secs(20)));
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        let Some(seen) = read_request(&mut reader) else { return };
        let path = seen.path.split('?').next().unwrap_or_default().to_owned();
        let fault = {
            let mut state = self.lock();
            state.seen.push(seen.clone());
            let queued = state.faults.get_mut(&path).and_then(VecDeque::pop_front);
            queued.or_else(|| state.always.get(&path).cloned())
        };
        let mut reply = match &fault {
            Some(Fault::Status(status, headers)) => {
                let headers =
                    headers.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
                Reply { status: *status, headers, body: b"{\"error\":\"as told\"}".to_vec() }
            }
            _ => {
                let ignore_range = matches!(fault, Some(Fault::IgnoreRange | Fault::IgnoreRangeAndCut(_)));
                self.answer(&seen, &path, ignore_range)
            }
        };
        match &fault {
            Some(Fault::Corrupt) => reply.body.iter_mut().for_each(|byte| *byte ^= 0x55),
            Some(Fault::Body(body)) => reply.body = body.clone(),
            Some(Fault::Etag(tag)) => reply.headers.push(("ETag".to_owned(), format!("\"{tag}\""))),
            _ => {}
        }
        send(stream, &reply, fault.as_ref());
    }

    fn answer(&self, seen: &Seen, path: &str, ignore_range: bool) -> Reply {
        let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        if let Some(token) = self.lock().token.clone()
            && seen.header("authorization") != Some(&format!("Bearer {token}"))
        {
            let headers = vec![("X-Error-Code".to_owned(), "GatedRepo".to_owned())];
            return Reply { status: 401, headers, body: b"{\"error\":\"Access is restricted\"}".to_vec() };
        }
        match (seen.method.as_str(), parts.as_slice()) {
            ("GET", ["api", "models", org, name, "revision", revision]) => {
                self.listing(&format!("{org}/{name}"), &revision.replace("%2F", "/"))
            }
            ("GET", [org, name, "resolve", commit, rest @ ..]) => {
                self.file(&format!("{org}/{name}"), commit, &rest.join("/"), seen, ignore_range)
            }
            ("GET", ["objects", hash]) => match self.lock().objects.get(*hash) {
                Some(bytes) => ranged(bytes, seen, ignore_range, Vec::new()),
                None => Reply::status(404),
            },
            ("POST", ["api", "repos", "create"]) => Reply::json(&json!({"url": "created"})),
            ("POST", ["api", _, _, _, "preupload", _]) => preupload(&seen.json()),
            ("POST", [_, _, "info", "lfs", "objects", "batch"]) => self.batch(&seen.json()),
            ("PUT", ["objects", hash]) => {
                self.lock().objects.insert((*hash).to_owned(), seen.body.clone());
                Reply::status(200)
            }
            ("PUT", ["parts", hash, number]) => {
                let number = number.parse().unwrap();
                self.lock().parts.entry((*hash).to_owned()).or_default().insert(number, seen.body.clone());
                let etag = format!("\"etag-{number}\"");
                Reply { status: 200, headers: vec![("ETag".to_owned(), etag)], body: Vec::new() }
            }
            ("POST", ["complete", hash]) => {
                let mut state = self.lock();
                let parts = state.parts.remove(*hash).unwrap_or_default();
                state.objects.insert((*hash).to_owned(), parts.into_values().flatten().collect());
                Reply::json(&json!({}))
            }
            ("POST", ["verify"]) => Reply::json(&json!({})),
            ("POST", ["api", _, _, _, "commit", _]) => Reply::json(
                &json!({"commitUrl": "https://hub/commit", "commitOid": OTHER_COMMIT, "pullRequestUrl": null}),
            ),
            _ => Reply::status(404),
        }
    }

    fn listing(&self, repo: &str, revision: &str) -> Reply {
        let state = self.lock();
        let key = (repo.to_owned(), revision.to_owned());
        let Some(commit) = state.revisions.get(&key) else { return Reply::status(404) };
        let files = state.files.get(&(repo.to_owned(), commit.clone())).cloned().unwrap_or_default();
        let siblings: Vec<Value> = files
            .iter()
            .map(|(path, file)| {
                let size = state.listed_sizes.get(path).copied().unwrap_or(file.bytes.len() as u64);
                let mut sibling = json!({"rfilename": path, "size": size, "blobId": file.git_sha1});
                if file.lfs {
                    sibling["lfs"] = json!({"sha256": file.sha256, "size": size, "pointerSize": 130});
                }
                sibling
            })
            .collect();
        Reply::json(&json!({"id": repo, "sha": commit, "siblings": siblings}))
    }

    fn file(&self, repo: &str, commit: &str, path: &str, seen: &Seen, ignore_range: bool) -> Reply {
        let state = self.lock();
        let files = state.files.get(&(repo.to_owned(), commit.to_owned()));
        let Some(file) = files.and_then(|files| files.get(path)) else { return Reply::status(404) };
        if !file.lfs {
            let tag = vec![("ETag".to_owned(), format!("\"{}\"", file.git_sha1))];
            return ranged(&file.bytes, seen, ignore_range, tag);
        }
        let hash = &file.sha256;
        let storage = state.storage.clone().unwrap_or_default();
        let headers = vec![
            ("Location".to_owned(), format!("{storage}/objects/{hash}")),
            ("X-Linked-Etag".to_owned(), format!("\"{hash}\"")),
            ("X-Linked-Size".to_owned(), file.bytes.len().to_string()),
        ];
        Reply { status: 302, headers, body: Vec::new() }
    }

    fn batch(&self, body: &Value) -> Reply {
        let state = self.lock();
        let storage = state.storage.clone().unwrap_or_default();
        let objects: Vec<Value> = body["objects"]
            .as_array()
            .unwrap()
            .iter()
            .map(|object| {
                let (oid, size) =
                    (object["oid"].as_str().unwrap(), object["size"].as_u64().unwrap() as usize);
                if state.objects.contains_key(oid) {
                    return json!({"oid": oid, "size": size});
                }
                let verify = json!({"href": format!("{}/verify", self.address), "header": {}});
                let upload = match state.part_size {
                    Some(part) if size > part => {
                        let mut header = json!({"chunk_size": part.to_string()});
                        for number in 1..=size.div_ceil(part) {
                            header[format!("{number:05}")] = json!(format!("{storage}/parts/{oid}/{number}"));
                        }
                        json!({"href": format!("{storage}/complete/{oid}"), "header": header})
                    }
                    _ => json!({"href": format!("{storage}/objects/{oid}"), "header": {"X-Extra": "yes"}}),
                };
                json!({"oid": oid, "size": size, "actions": {"upload": upload, "verify": verify}})
            })
            .collect();
        Reply::json(&json!({"transfer": "basic", "objects": objects}))
    }
}

fn preupload(body: &Value) -> Reply {
    let files: Vec<Value> = body["files"]
        .as_array()
        .unwrap()
        .iter()
        .map(|file| {
            let path = file["path"].as_str().unwrap();
            let lfs = path.ends_with(".safetensors");
            let ignored = path.ends_with(".ignored");
            json!({"path": path, "uploadMode": if lfs { "lfs" } else { "regular" }, "shouldIgnore": ignored})
        })
        .collect();
    Reply::json(&json!({"files": files}))
}

struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Reply {
    fn status(status: u16) -> Self {
        let body = if status < 300 { Vec::new() } else { b"{\"error\":\"not here\"}".to_vec() };
        Self { status, headers: Vec::new(), body }
    }

    fn json(value: &Value) -> Self {
        Self { status: 200, headers: Vec::new(), body: value.to_string().into_bytes() }
    }
}

fn ranged(bytes: &[u8], seen: &Seen, ignore: bool, mut headers: Vec<(String, String)>) -> Reply {
    let start =
        seen.header("range").and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
    match start.filter(|_| !ignore) {
        Some(start) if start >= bytes.len() => Reply::status(416),
        Some(start) => {
            let range = format!("bytes {start}-{}/{}", bytes.len() - 1, bytes.len());
            headers.push(("Content-Range".to_owned(), range));
            Reply { status: 206, headers, body: bytes[start..].to_vec() }
        }
        None => Reply { status: 200, headers, body: bytes.to_vec() },
    }
}

fn read_request(reader: &mut BufReader<TcpStream>) -> Option<Seen> {
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace();
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let length = headers.get("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(Seen { method, path, headers, body })
}

fn send(mut stream: TcpStream, reply: &Reply, fault: Option<&Fault>) {
    let length = match fault {
        Some(Fault::Length(length)) => *length,
        _ => reply.body.len(),
    };
    let mut head =
        format!("HTTP/1.1 {} X\r\nContent-Length: {length}\r\nConnection: close\r\n", reply.status);
    for (name, value) in &reply.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    // The client may be gone, which is no matter here.
    let _ = stream.write_all(head.as_bytes());
    match fault {
        Some(Fault::CutAfter(count) | Fault::IgnoreRangeAndCut(count)) => {
            let _ = stream.write_all(&reply.body[..(*count).min(reply.body.len())]);
        }
        Some(Fault::StallAfter(count, pause)) => {
            let _ = stream.write_all(&reply.body[..(*count).min(reply.body.len())]);
            thread::sleep(*pause);
        }
        Some(Fault::Slow(count, pause)) => {
            for piece in reply.body.chunks(*count) {
                if stream.write_all(piece).is_err() {
                    return;
                }
                thread::sleep(*pause);
            }
        }
        _ => {
            let _ = stream.write_all(&reply.body);
        }
    }
}

pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

pub fn git_sha1(bytes: &[u8]) -> String {
    hex(&Sha1::new().chain_update(format!("blob {}\0", bytes.len())).chain_update(bytes).finalize())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
