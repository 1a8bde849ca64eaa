// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/* Objects, work requests and completions as most tests use them. */
#include "verbs-test.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>

struct ibv_context *ctx;
struct ibv_device_attr_ex dev;
struct ibv_port_attr port;
union ibv_gid gid;
int gid_index;

/* The GID of the IPv4 address, of RoCE v2. */
static void find_gid(struct ibv_context *context)
{
	static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };
	struct ibv_gid_entry entry;

	for (int i = 0; i < port.gid_tbl_len; i++) {
		if (ibv_query_gid_ex(context, PORT, i, &entry, 0))
			continue;
		if (entry.gid_type == IBV_GID_TYPE_ROCE_V2 && memcmp(entry.gid.raw, mapped, sizeof(mapped)) == 0) {
			gid = entry.gid;
			gid_index = i;
			return;
		}
	}
	fail("the port has no GID for an IPv4 address");
}

struct ibv_context *open_device(void)
{
	const char *wanted = getenv("VERBS_DEVICE");
	struct ibv_context *context = NULL;
	struct ibv_device **list;
	int n = 0;

	list = MAKE(ibv_get_device_list(&n));
	for (int i = 0; i < n && !context; i++)
		if (!wanted || strcmp(wanted, ibv_get_device_name(list[i])) == 0)
			context = MAKE(ibv_open_device(list[i]));
	if (!context)
		fail("there is no device");
	ibv_free_device_list(list);
	OK(ibv_query_device_ex(context, NULL, &dev));
	OK(ibv_query_port(context, PORT, &port));
	find_gid(context);
	return context;
}

/* Time. */

uint64_t now_ns(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

void sleep_ms(unsigned int ms)
{
	usleep(ms * 1000);
}

/* Memory. */

void *pages(size_t length)
{
	void *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(memory != MAP_FAILED);
	return memory;
}

struct region region(struct ibv_pd *pd, size_t length, int access)
{
	struct region region = { .p = pages(length), .length = length };

	region.mr = MAKE(ibv_reg_mr(pd, region.p, length, access));
	return region;
}

struct ibv_sge sge(const struct region *region, size_t offset, uint32_t length)
{
	return (struct ibv_sge){ (uintptr_t)region->p + offset, length, region->mr->lkey };
}

static uint8_t byte_of(size_t i, unsigned int seed)
{
	uint32_t x = (uint32_t)i * 2654435761u ^ seed * 0x9e3779b9u;

	return (x >> 24 ^ x >> 11) | 1;
}

void fill(void *memory, size_t length, unsigned int seed)
{
	for (size_t i = 0; i < length; i++)
		((uint8_t *)memory)[i] = byte_of(i, seed);
}

bool filled(const void *memory, size_t length, unsigned int seed)
{
	for (size_t i = 0; i < length; i++)
		if (((const uint8_t *)memory)[i] != byte_of(i, seed))
			return false;
	return true;
}

bool all_bytes(const void *memory, size_t length, uint8_t byte)
{
	for (size_t i = 0; i < length; i++)
		if (((const uint8_t *)memory)[i] != byte)
			return false;
	return true;
}

/* States. */

struct conn conn(uint32_t qpn)
{
	return (struct conn){
		.qpn = qpn,
		.dgid = gid,
		.access = REMOTE,
		.mtu = IBV_MTU_1024,
		.rd_atomic = 4,
		.dest_rd_atomic = 4,
		.min_rnr_timer = 12,
		.timeout = 17,
		.retry_cnt = 7,
		.rnr_retry = 7,
	};
}

struct ibv_ah_attr path_to(union ibv_gid dgid)
{
	return (struct ibv_ah_attr){
		.is_global = 1,
		.port_num = PORT,
		.grh = { .dgid = dgid, .sgid_index = gid_index, .hop_limit = 64 },
	};
}

union ibv_gid group_gid(unsigned int number)
{
	/* 239.77.0.NUMBER, mapped to IPv6. */
	return (union ibv_gid){ .raw = { [10] = 0xff, 0xff, 239, 77, 0, number } };
}

int try_init(struct ibv_qp *qp, int access)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = PORT, .qp_access_flags = access };

	return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

int try_rtr(struct ibv_qp *qp, const struct conn *conn)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR,
		.ah_attr = path_to(conn->dgid),
		.path_mtu = conn->mtu,
		.dest_qp_num = conn->qpn,
		.rq_psn = PSN,
		.max_dest_rd_atomic = conn->dest_rd_atomic,
		.min_rnr_timer = conn->min_rnr_timer,
	};
	int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;

	if (qp->qp_type == IBV_QPT_RC || qp->qp_type == IBV_QPT_XRC_RECV)
		mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	return ibv_modify_qp(qp, &attr, mask);
}

int try_rts(struct ibv_qp *qp, const struct conn *conn)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTS,
		.sq_psn = PSN,
		.timeout = conn->timeout,
		.retry_cnt = conn->retry_cnt,
		.rnr_retry = conn->rnr_retry,
		.max_rd_atomic = conn->rd_atomic,
	};
	int mask = IBV_QP_STATE | IBV_QP_SQ_PSN;

	if (qp->qp_type == IBV_QPT_XRC_RECV)
		mask |= IBV_QP_TIMEOUT;
	else if (qp->qp_type != IBV_QPT_UC)
		mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	return ibv_modify_qp(qp, &attr, mask);
}

void to_init(struct ibv_qp *qp, int access)
{
	OK(try_init(qp, access));
}

void to_rtr(struct ibv_qp *qp, const struct conn *conn)
{
	OK(try_rtr(qp, conn));
}

void to_rts(struct ibv_qp *qp, const struct conn *conn)
{
	OK(try_rts(qp, conn));
}

void connect_qp(struct ibv_qp *qp, const struct conn *conn)
{
	to_init(qp, conn->access);
	to_rtr(qp, conn);
	to_rts(qp, conn);
}

void ready_ud(struct ibv_qp *qp, uint32_t qkey)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = PORT, .qkey = qkey };

	OK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
	set_state(qp, IBV_QPS_RTR);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .sq_psn = PSN };
	OK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
}

int try_state(struct ibv_qp *qp, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = { .qp_state = state };

	return ibv_modify_qp(qp, &attr, IBV_QP_STATE);
}

void set_state(struct ibv_qp *qp, enum ibv_qp_state state)
{
	OK(try_state(qp, state));
}

enum ibv_qp_state state_of(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	OK(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init));
	return attr.qp_state;
}

void wait_state(struct ibv_qp *qp, enum ibv_qp_state state)
{
	uint64_t deadline = now_ns() + TIMEOUT_MS * 1000000ull;

	while (state_of(qp) != state)
		if (now_ns() > deadline)
			fail("the queue pair is in state %d, not %d", state_of(qp), state);
}

/* Pairs. */

struct ibv_cq *make_cq(int cqe)
{
	return MAKE(ibv_create_cq(ctx, cqe, NULL, NULL, 0));
}

struct ibv_qp *make_qp(struct ibv_pd *pd, struct ibv_cq *cq, const struct pair_with *with)
{
	struct ibv_qp_init_attr_ex attr = {
		.send_cq = cq,
		.recv_cq = cq,
		.srq = with->srq,
		.cap = {
			.max_send_wr = with->send_wr ? with->send_wr : 32,
			.max_recv_wr = with->recv_wr ? with->recv_wr : 32,
			.max_send_sge = with->sge ? with->sge : 4,
			.max_recv_sge = with->sge ? with->sge : 4,
			.max_inline_data = with->inline_data,
		},
		.qp_type = with->type,
		.sq_sig_all = with->sig_all,
		.comp_mask = IBV_QP_INIT_ATTR_PD,
		.pd = pd,
	};

	if (with->ops) {
		attr.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
		attr.send_ops_flags = with->ops;
	}
	return MAKE_IF_SUPPORTED(ibv_create_qp_ex(ctx, &attr));
}

void connect_pair(struct pair *pair, const struct conn *how)
{
	for (int i = 0; i < 2; i++) {
		struct conn to = *how;

		to.qpn = pair->qp[!i]->qp_num;
		if (pair->qp[i]->qp_type == IBV_QPT_UD)
			ready_ud(pair->qp[i], QKEY);
		else
			connect_qp(pair->qp[i], &to);
	}
}

struct pair make_pair(const struct pair_with *with)
{
	struct pair pair;
	struct conn usual = conn(0);

	for (int i = 0; i < 2; i++) {
		pair.pd[i] = i && with->one_pd ? pair.pd[0] : MAKE(ibv_alloc_pd(ctx));
		pair.cq[i] = MAKE(ibv_create_cq(ctx, with->cqe ? with->cqe : 128, NULL, with->channel, 0));
		pair.mr[i] = region(pair.pd[i], with->size ? with->size : 16384, with->mr_access ? with->mr_access : ALL);
		pair.qp[i] = make_qp(pair.pd[i], pair.cq[i], with);
	}
	if (!with->reset)
		connect_pair(&pair, with->conn ? with->conn : &usual);
	return pair;
}

/* Posting. */

static int post_ex(struct ibv_qp *qp, const struct op *op, struct ibv_sge *list, int n)
{
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);
	uint64_t addr = op->to ? (uintptr_t)op->to->p + op->to_offset : op->addr;
	uint32_t rkey = op->to ? op->to->mr->rkey : op->rkey;
	struct ibv_data_buf bufs[16];
	uint64_t value = 0;

	CHECK(ex);
	ibv_wr_start(ex);
	ex->wr_id = op->id;
	ex->wr_flags = op->flags & ~IBV_SEND_INLINE;
	if (!op->unsignaled)
		ex->wr_flags |= IBV_SEND_SIGNALED;
	switch ((int)op->opcode) {
	case IBV_WR_SEND:
		ibv_wr_send(ex);
		break;
	case IBV_WR_SEND_WITH_IMM:
		ibv_wr_send_imm(ex, op->imm);
		break;
	case IBV_WR_SEND_WITH_INV:
		ibv_wr_send_inv(ex, op->invalidate);
		break;
	case IBV_WR_RDMA_WRITE:
		ibv_wr_rdma_write(ex, rkey, addr);
		break;
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		ibv_wr_rdma_write_imm(ex, rkey, addr, op->imm);
		break;
	case IBV_WR_RDMA_READ:
		ibv_wr_rdma_read(ex, rkey, addr);
		break;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
		ibv_wr_atomic_cmp_swp(ex, rkey, addr, op->compare_add, op->swap);
		break;
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		ibv_wr_atomic_fetch_add(ex, rkey, addr, op->compare_add);
		break;
	case IBV_WR_LOCAL_INV:
		ibv_wr_local_inv(ex, op->invalidate);
		break;
	case IBV_WR_BIND_MW:
		ibv_wr_bind_mw(ex, op->mw, op->new_rkey, &op->bind);
		break;
	case IBV_WR_FLUSH:
		ibv_wr_flush(ex, rkey, addr, op->length, op->flush_type, op->flush_level);
		break;
	case IBV_WR_ATOMIC_WRITE:
		value = op->swap;
		ibv_wr_atomic_write(ex, rkey, addr, &value);
		break;
	default:
		fail("opcode %d", op->opcode);
	}
	if (qp->qp_type == IBV_QPT_UD || op->ah)
		ibv_wr_set_ud_addr(ex, op->ah, op->qpn, op->qkey);
	if (qp->qp_type == IBV_QPT_XRC_SEND)
		ibv_wr_set_xrc_srqn(ex, op->srqn);
	if (op->opcode == IBV_WR_LOCAL_INV || op->opcode == IBV_WR_BIND_MW || op->opcode == IBV_WR_FLUSH ||
	    op->opcode == IBV_WR_ATOMIC_WRITE) {
		/* Without data. */
	} else if (op->flags & IBV_SEND_INLINE) {
		for (int i = 0; i < n; i++)
			bufs[i] = (struct ibv_data_buf){ (void *)(uintptr_t)list[i].addr, list[i].length };
		if (n == 1)
			ibv_wr_set_inline_data(ex, bufs[0].addr, bufs[0].length);
		else
			ibv_wr_set_inline_data_list(ex, n, bufs);
	} else if (n == 1) {
		ibv_wr_set_sge(ex, list[0].lkey, list[0].addr, list[0].length);
	} else {
		ibv_wr_set_sge_list(ex, n, list);
	}
	return ibv_wr_complete(ex);
}

int post(struct ibv_qp *qp, const struct op *op)
{
	struct ibv_sge one = { 0 }, *list = op->list;
	struct ibv_send_wr *bad = NULL, wr = {
		.wr_id = op->id,
		.opcode = op->opcode,
		.send_flags = op->flags | (op->unsignaled ? 0 : IBV_SEND_SIGNALED),
		.num_sge = op->num_sge,
	};
	uint64_t addr = op->to ? (uintptr_t)op->to->p + op->to_offset : op->addr;
	uint32_t rkey = op->to ? op->to->mr->rkey : op->rkey;
	int error;

	if (op->from) {
		one = sge(op->from, op->offset, op->length);
		list = &one;
		wr.num_sge = 1;
	}
	if (op->ex)
		return post_ex(qp, op, list, wr.num_sge);
	wr.sg_list = list;
	switch ((int)op->opcode) {
	case IBV_WR_SEND_WITH_IMM:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		wr.imm_data = op->imm;
		break;
	case IBV_WR_SEND_WITH_INV:
	case IBV_WR_LOCAL_INV:
		wr.invalidate_rkey = op->invalidate;
		break;
	case IBV_WR_BIND_MW:
		wr.bind_mw.mw = op->mw;
		wr.bind_mw.rkey = op->new_rkey;
		wr.bind_mw.bind_info = op->bind;
		break;
	}
	if (qp->qp_type == IBV_QPT_UD || op->ah) {
		wr.wr.ud.ah = op->ah;
		wr.wr.ud.remote_qpn = op->qpn;
		wr.wr.ud.remote_qkey = op->qkey;
	} else if (op->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || op->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = addr;
		wr.wr.atomic.rkey = rkey;
		wr.wr.atomic.compare_add = op->compare_add;
		wr.wr.atomic.swap = op->swap;
	} else {
		wr.wr.rdma.remote_addr = addr;
		wr.wr.rdma.rkey = rkey;
	}
	if (qp->qp_type == IBV_QPT_XRC_SEND)
		wr.qp_type.xrc.remote_srqn = op->srqn;
	error = RESULT(ibv_post_send(qp, &wr, &bad));
	if (error && bad != &wr)
		fail("ibv_post_send fails and does not say with which work request");
	return error;
}

int post_recv(struct ibv_qp *qp, uint64_t id, const struct region *region, size_t offset, uint32_t length)
{
	struct ibv_sge list = { 0 };
	struct ibv_recv_wr *bad = NULL, wr = { .wr_id = id };
	int error;

	if (region) {
		list = sge(region, offset, length);
		wr.sg_list = &list;
		wr.num_sge = 1;
	}
	error = RESULT(ibv_post_recv(qp, &wr, &bad));
	if (error && bad != &wr)
		fail("ibv_post_recv fails and does not say with which work request");
	return error;
}

int post_srq(struct ibv_srq *srq, uint64_t id, const struct region *region, size_t offset, uint32_t length)
{
	struct ibv_sge list = { 0 };
	struct ibv_recv_wr *bad = NULL, wr = { .wr_id = id };

	if (region) {
		list = sge(region, offset, length);
		wr.sg_list = &list;
		wr.num_sge = 1;
	}
	return RESULT(ibv_post_srq_recv(srq, &wr, &bad));
}

/* Completions and events. */

struct ibv_wc wait_wc_at(const char *file, int line, struct ibv_cq *cq)
{
	uint64_t deadline = now_ns() + TIMEOUT_MS * 1000000ull;
	struct ibv_wc wc = { 0 };
	int n;

	while ((n = ibv_poll_cq(cq, 1, &wc)) == 0)
		if (now_ns() > deadline)
			fail_at(file, line, "no completion");
	if (n != 1)
		fail_at(file, line, "ibv_poll_cq: %d", n);
	return wc;
}

struct ibv_wc expect_at(const char *file, int line, struct ibv_cq *cq, uint64_t id, enum ibv_wc_status status, int opcode)
{
	struct ibv_wc wc = wait_wc_at(file, line, cq);

	if (wc.wr_id != id || wc.status != status)
		fail_at(file, line, "completion %llu with status %d (%s, vendor_err %u), not %llu with %d (%s)",
			(unsigned long long)wc.wr_id, wc.status, ibv_wc_status_str(wc.status), wc.vendor_err,
			(unsigned long long)id, status, ibv_wc_status_str(status));
	if (status == IBV_WC_SUCCESS && wc.opcode != (enum ibv_wc_opcode)opcode)
		fail_at(file, line, "completion %llu with opcode %d, not %d", (unsigned long long)id, wc.opcode, opcode);
	return wc;
}

void expect_none_at(const char *file, int line, struct ibv_cq *cq)
{
	uint64_t deadline = now_ns() + QUIET * 1000000ull;
	struct ibv_wc wc;

	do {
		if (ibv_poll_cq(cq, 1, &wc) != 0)
			fail_at(file, line, "completion %llu with status %d (%s), and there should be none",
				(unsigned long long)wc.wr_id, wc.status, ibv_wc_status_str(wc.status));
	} while (now_ns() < deadline);
}

static bool readable(int fd, int ms)
{
	struct pollfd poll_fd = { .fd = fd, .events = POLLIN };

	return poll(&poll_fd, 1, ms) > 0;
}

struct ibv_async_event wait_event_at(const char *file, int line, struct ibv_context *context, enum ibv_event_type type)
{
	struct ibv_async_event event;

	if (!readable(context->async_fd, TIMEOUT_MS))
		fail_at(file, line, "no event; %s should come", ibv_event_type_str(type));
	OK(ibv_get_async_event(context, &event));
	if (event.event_type != type)
		fail_at(file, line, "event %s, not %s", ibv_event_type_str(event.event_type), ibv_event_type_str(type));
	ibv_ack_async_event(&event);
	return event;
}

void no_event_at(const char *file, int line, struct ibv_context *context)
{
	struct ibv_async_event event;

	if (!readable(context->async_fd, QUIET))
		return;
	OK(ibv_get_async_event(context, &event));
	fail_at(file, line, "event %s, and there should be none", ibv_event_type_str(event.event_type));
}

bool channel_event(struct ibv_comp_channel *channel, struct ibv_cq *cq, int ms)
{
	struct ibv_cq *found;
	void *context;

	if (!readable(channel->fd, ms))
		return false;
	OK(ibv_get_cq_event(channel, &found, &context));
	if (cq && found != cq)
		fail("a completion event of another completion queue");
	ibv_ack_cq_events(found, 1);
	return true;
}

void drop_net_raw(void)
{
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct data[2];

	CHECK(syscall(SYS_capget, &header, data) == 0);
	data[0].effective &= ~(1u << CAP_NET_RAW);
	data[0].permitted &= ~(1u << CAP_NET_RAW);
	CHECK(syscall(SYS_capset, &header, data) == 0);
}
