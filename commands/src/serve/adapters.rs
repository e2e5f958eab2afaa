//! `/v1/adapters`: LoRA adapters that requests may name.
//!
//! A request names a path on the server's disk; it must lie in the folder of `--adapter-root`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path as UrlPath, State};
use axum::http::{Request, StatusCode};
use axum::response::Response;
use mlx_bun::scheduler::{AdapterInfo, MountError};
use serde_json::{Value, json};

use super::app::App;
use super::error::ApiError;
use super::fields::Fields;
use super::prepare::submit_error;
use super::reply::json_response;

/// What `adapter_config.json` says, for lists.
fn described(path: &Path) -> (Value, Value) {
    let config = std::fs::read(path.join("adapter_config.json")).unwrap_or_default();
    let config: Value = serde_json::from_slice(&config).unwrap_or_default();
    let parameters = config.get("lora_parameters").unwrap_or(&config);
    let number =
        |names: [&str; 2]| names.iter().find_map(|name| parameters.get(*name)).filter(|v| v.is_number());
    let value = |names| number(names).cloned().unwrap_or_default();
    (value(["rank", "r"]), value(["scale", "lora_alpha"]))
}

fn listed(adapter: &AdapterInfo) -> Value {
    let (rank, scale) = described(&adapter.path);
    json!({
        "id": adapter.id, "path": adapter.path, "rank": rank, "scale": scale, "size_bytes": adapter.bytes,
        "mounted_layers": adapter.modules,
    })
}

/// The mounted adapters.
pub async fn list(State(app): State<Arc<App>>) -> Response {
    let adapters: Vec<_> = app.engine.adapters().iter().map(listed).collect();
    json_response(&json!({"adapters": adapters}))
}

/// Adapters in the folder of `--adapter-root`.
pub async fn available(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let adapters = app.off_thread(|app| {
        let mounted = app.engine.adapters();
        let root = app.policy.adapter_root.as_deref();
        let folders = root.and_then(|root| std::fs::read_dir(root).ok()).into_iter().flatten().flatten();
        let is_adapter = |path: &PathBuf| {
            ["adapters.safetensors", "adapter_model.safetensors"].iter().any(|name| path.join(name).is_file())
        };
        let entry = |path: PathBuf| {
            let (rank, scale) = described(&path);
            let id = path.file_name().map(|name| name.to_string_lossy().into_owned());
            let is_mounted = mounted.iter().any(|adapter| adapter.path == path);
            json!({"id": id, "path": path, "rank": rank, "scale": scale, "mounted": is_mounted})
        };
        Ok(folders.map(|folder| folder.path()).filter(is_adapter).map(entry).collect::<Vec<_>>())
    });
    adapters.await.map(|adapters| json_response(&json!({"adapters": adapters})))
}

/// Mounts an adapter.
pub async fn mount(State(app): State<Arc<App>>, request: Request<Body>) -> Result<Response, ApiError> {
    let body = app.bodies.read_object(request).await?;
    let fields = Fields::new(&body);
    let (Some(id), Some(path)) = (fields.text("id")?, fields.text("path")?) else {
        return Err(ApiError::invalid("id and path required"));
    };
    let path =
        app.policy.adapter_root.as_deref().map_or_else(|| Err(no_root()), |root| inside(root, path))?;
    let id = id.to_owned();
    let mounted =
        app.off_thread(move |app| app.engine.mount(&id, &path).map_err(|error| mount_error(&error))).await?;
    Ok(json_response(&listed(&mounted)))
}

/// Unmounts an adapter.
pub async fn unmount(
    State(app): State<Arc<App>>,
    UrlPath(id): UrlPath<String>,
) -> Result<Response, ApiError> {
    let layers = app.engine.adapters().iter().find(|adapter| adapter.id == id).map(|adapter| adapter.modules);
    let name = id.clone();
    app.off_thread(move |app| app.engine.unmount(&name).map_err(|error| mount_error(&error))).await?;
    Ok(json_response(&json!({"id": id, "removed_layers": layers})))
}

fn no_root() -> ApiError {
    let message = "adapters are mounted from one folder only; start the server with --adapter-root DIR";
    ApiError::new(StatusCode::FORBIDDEN, message)
}

/// The folder that a client names, which must lie inside the root whatever links there are.
fn inside(root: &Path, path: &str) -> Result<PathBuf, ApiError> {
    let outside = || ApiError::field("path", "is no adapter in the folder of --adapter-root");
    let root = root.canonicalize().map_err(|_| outside())?;
    let path = root.join(path).canonicalize().map_err(|_| outside())?;
    match path.starts_with(&root) && path != root {
        true => Ok(path),
        false => Err(outside()),
    }
}

fn mount_error(error: &MountError) -> ApiError {
    match error {
        MountError::Unknown(id) => ApiError::not_found(format!("adapter {id} not mounted")),
        MountError::Refused(error) => submit_error(error),
        MountError::Taken(_) | MountError::Name(_) | MountError::Adapter(_) => {
            ApiError::invalid(error.to_string())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn x4_paths_stay_inside_the_root() {
        let root = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("a")).unwrap();
        std::os::unix::fs::symlink(outside.path(), root.path().join("link")).unwrap();
        let canonical = root.path().canonicalize().unwrap();
        assert_eq!(inside(root.path(), "a").unwrap(), canonical.join("a"));
        let whole = root.path().join("a");
        assert_eq!(inside(root.path(), whole.to_str().unwrap()).unwrap(), canonical.join("a"));
        for path in ["..", "a/../..", "/etc", "link", ".", "", "none"] {
            assert!(inside(root.path(), path).is_err(), "{path}");
        }
    }
}
