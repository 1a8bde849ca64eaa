// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
/* What the tests use: objects that go with the test, connections, memory, work requests. */
#include <linux/delay.h>
#include <linux/etherdevice.h>
#include <linux/mm.h>
#include <linux/preempt.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>
#include <rdma/ib_cache.h>

#include "kernel-verbs.h"

#define PORT 1
/* Longer than anything takes, on a busy machine. */
#define LONG_MS 20000

static void undo_memory(void *what)
{
	kvfree(what);
}

void *memory(size_t size)
{
	void *made = kvzalloc(size, GFP_KERNEL);

	if (!made)
		fail("no memory for %zu bytes", size);
	defer(UNDO_LAST, undo_memory, made);
	return made;
}

/* Reasons to skip. */

void need_cap(u64 device_cap, const char *what)
{
	if (!(device->attrs.device_cap_flags & device_cap))
		skip("the device has no %s", what);
}

void need_fast_registration(void)
{
	need_cap(IB_DEVICE_MEM_MGT_EXTENSIONS, "memory management extensions");
}

void need_sg_gaps(void)
{
	need_fast_registration();
	if (!(device->attrs.kernel_cap_flags & IBK_SG_GAPS_REG))
		skip("the device has no regions with gaps");
}

/* Completions. */

static atomic_t completions = ATOMIC_INIT(0);

static void op_done(struct ib_cq *cq, struct ib_wc *wc)
{
	struct op *op = container_of(wc->wr_cqe, struct op, cqe);

	op->wc = *wc;
	op->in_softirq = in_serving_softirq();
	op->order = atomic_inc_return(&completions);
	complete_all(&op->done);
}

void op_init(struct op *op, struct ib_cq *cq)
{
	op->cqe.done = op_done;
	op->cq = cq;
	op->order = 0;
	init_completion(&op->done);
}

bool completed(struct op *op)
{
	if (op->cq->poll_ctx == IB_POLL_DIRECT)
		ib_process_cq_direct(op->cq, -1);
	return completion_done(&op->done);
}

bool completes(struct op *op, unsigned int milliseconds)
{
	unsigned long end = jiffies + msecs_to_jiffies(milliseconds);

	if (op->cq->poll_ctx != IB_POLL_DIRECT)
		return wait_for_completion_timeout(&op->done, msecs_to_jiffies(milliseconds)) != 0;
	while (!completed(op)) {
		if (time_after(jiffies, end))
			return completed(op);
		usleep_range(20, 100);
	}
	return true;
}

void expect(struct op *op, enum ib_wc_status status)
{
	if (!completes(op, LONG_MS))
		fail("no completion; expected: %s", ib_wc_status_msg(status));
	if (op->wc.status != status)
		fail("status is %s (%d, vendor error %u), not %s (%d)", ib_wc_status_msg(op->wc.status), op->wc.status,
		     op->wc.vendor_err, ib_wc_status_msg(status), status);
}

void expect_ok(struct op *op, enum ib_wc_opcode opcode)
{
	expect(op, IB_WC_SUCCESS);
	EQ(op->wc.opcode, opcode);
}

/* Objects. */

static void undo_pd(void *what)
{
	ib_dealloc_pd(what);
}

struct ib_pd *make_pd(unsigned int flags)
{
	struct ib_pd *pd = ib_alloc_pd(device, flags);

	if (IS_ERR(pd))
		fail("ib_alloc_pd: %ld", PTR_ERR(pd));
	defer(UNDO_LAST, undo_pd, pd);
	return pd;
}

static void undo_cq(void *what)
{
	ib_free_cq(what);
}

struct ib_cq *make_cq(int entries, enum ib_poll_context context)
{
	struct ib_cq *cq = ib_alloc_cq(device, NULL, entries, 0, context);

	if (IS_ERR(cq))
		fail("ib_alloc_cq: %ld", PTR_ERR(cq));
	defer(UNDO_CQ, undo_cq, cq);
	return cq;
}

static void undo_srq(void *what)
{
	ib_destroy_srq(what);
}

struct ib_srq *make_srq(struct ib_pd *pd, u32 entries, u32 sges, void (*event)(struct ib_event *event, void *context),
			void *context)
{
	struct ib_srq_init_attr init = {
		.event_handler = event,
		.srq_context = context,
		.attr = { .max_wr = entries, .max_sge = sges },
		.srq_type = IB_SRQT_BASIC,
	};
	struct ib_srq *srq;

	if (!device->attrs.max_srq)
		skip("the device has no shared receive queues");
	srq = ib_create_srq(pd, &init);
	if (IS_ERR(srq))
		fail("ib_create_srq: %ld", PTR_ERR(srq));
	defer(UNDO_CQ, undo_srq, srq);
	return srq;
}

static void undo_mr(void *what)
{
	ib_dereg_mr(what);
}

struct ib_mr *make_mr(struct ib_pd *pd, enum ib_mr_type type, u32 pages)
{
	struct ib_mr *mr;

	need_fast_registration();
	mr = ib_alloc_mr(pd, type, pages);
	if (IS_ERR(mr))
		fail("ib_alloc_mr(%d, %u): %ld", type, pages, PTR_ERR(mr));
	defer(UNDO_LAST, undo_mr, mr);
	return mr;
}

/* The GID of the port that stands for its IPv4 address. */
static void own_gid(union ib_gid *gid, u8 *index)
{
	struct ib_port_attr port;
	int i;

	OK(ib_query_port(device, PORT, &port));
	for (i = 0; i < port.gid_tbl_len; i++) {
		const struct ib_gid_attr *attr = rdma_get_gid_attr(device, PORT, i);
		bool found;

		if (IS_ERR(attr))
			continue;
		found = attr->gid_type == IB_GID_TYPE_ROCE_UDP_ENCAP &&
			ipv6_addr_v4mapped((const struct in6_addr *)attr->gid.raw);
		*gid = attr->gid;
		rdma_put_gid_attr(attr);
		if (found) {
			*index = i;
			return;
		}
	}
	fail("the port has no GID of an IPv4 address");
}

void address(struct rdma_ah_attr *attr)
{
	struct net_device *ndev = ib_device_get_netdev(device, PORT);
	union ib_gid gid;
	u8 index = 0;

	if (!ndev)
		fail("the device is paired with no network interface");
	own_gid(&gid, &index);
	memset(attr, 0, sizeof(*attr));
	attr->type = RDMA_AH_ATTR_TYPE_ROCE;
	rdma_ah_set_port_num(attr, PORT);
	rdma_ah_set_grh(attr, &gid, 0, index, 64, 0);
	/* Users in the kernel resolve addresses themselves. */
	ether_addr_copy(attr->roce.dmac, ndev->dev_addr);
	dev_put(ndev);
}

static void undo_ah(void *what)
{
	rdma_destroy_ah(what, RDMA_DESTROY_AH_SLEEPABLE);
}

struct ib_ah *make_ah(struct ib_pd *pd)
{
	struct rdma_ah_attr attr;
	struct ib_ah *ah;

	address(&attr);
	ah = rdma_create_ah(pd, &attr, RDMA_CREATE_AH_SLEEPABLE);
	if (IS_ERR(ah))
		fail("rdma_create_ah: %ld", PTR_ERR(ah));
	defer(UNDO_LAST, undo_ah, ah);
	return ah;
}

static u32 entries(const struct options *options)
{
	return options->entries ?: 64;
}

static void undo_qp(void *what)
{
	ib_destroy_qp(what);
}

void destroy_qp(struct end *end)
{
	forget(end->qp);
	OK(ib_destroy_qp(end->qp));
	end->qp = NULL;
}

void make_end(struct end *end, const struct options *options, bool with_srq)
{
	enum ib_poll_context context = options->polled ? options->context : IB_POLL_DIRECT;
	bool shares = with_srq && options->srq;
	struct ib_qp_init_attr init = {
		.event_handler = options->event,
		.qp_context = options->context_of_event,
		.srq = shares ? options->srq : NULL,
		.cap = {
			.max_send_wr = entries(options),
			.max_recv_wr = shares ? 0 : entries(options),
			.max_send_sge = options->sges ?: 4,
			.max_recv_sge = shares ? 0 : options->sges ?: 4,
			.max_inline_data = options->inline_bytes,
			.max_rdma_ctxs = options->rdma_ctxs,
		},
		.sq_sig_type = options->signal_all ? IB_SIGNAL_ALL_WR : IB_SIGNAL_REQ_WR,
		.qp_type = options->type ?: IB_QPT_RC,
		.port_num = PORT,
	};

	if (!end->pd)
		end->pd = make_pd(0);
	/* Room for what the core adds to the queues for registration, and for draining. */
	end->send_cq = options->cq ?: make_cq(8 * entries(options) + 16, context);
	end->recv_cq = options->cq ?: make_cq(2 * entries(options) + 16, context);
	init.send_cq = end->send_cq;
	init.recv_cq = end->recv_cq;
	end->qp = ib_create_qp(end->pd, &init);
	if (IS_ERR(end->qp))
		fail("ib_create_qp: %ld", PTR_ERR(end->qp));
	defer(UNDO_QP, undo_qp, end->qp);
}

static bool reliable(const struct end *end)
{
	return end->qp->qp_type != IB_QPT_UC && end->qp->qp_type != IB_QPT_UD;
}

void to_init(struct end *end, const struct options *options)
{
	struct ib_qp_attr attr = {
		.qp_state = IB_QPS_INIT,
		.port_num = PORT,
		.qp_access_flags = options->access ?: ALL_ACCESS,
		.qkey = 0x11223344,
	};
	int mask = IB_QP_STATE | IB_QP_PKEY_INDEX | IB_QP_PORT;

	if (end->qp->qp_type == IB_QPT_UC)
		attr.qp_access_flags &= IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE;
	mask |= end->qp->qp_type == IB_QPT_UD ? IB_QP_QKEY : IB_QP_ACCESS_FLAGS;
	OK(ib_modify_qp(end->qp, &attr, mask));
}

void to_rtr(struct end *end, const struct end *peer, const struct options *options)
{
	struct ib_qp_attr attr = {
		.qp_state = IB_QPS_RTR,
		.path_mtu = IB_MTU_1024,
		.dest_qp_num = peer->qp->qp_num,
		.rq_psn = 0x100,
		.max_dest_rd_atomic = 8,
		.min_rnr_timer = 1,
	};
	int mask = IB_QP_STATE;

	if (end->qp->qp_type != IB_QPT_UD) {
		mask |= IB_QP_AV | IB_QP_PATH_MTU | IB_QP_DEST_QPN | IB_QP_RQ_PSN;
		address(&attr.ah_attr);
	}
	if (reliable(end) && end->qp->qp_type != IB_QPT_XRC_INI)
		mask |= IB_QP_MAX_DEST_RD_ATOMIC | IB_QP_MIN_RNR_TIMER;
	OK(ib_modify_qp(end->qp, &attr, mask));
}

void to_rts(struct end *end, const struct options *options)
{
	struct ib_qp_attr attr = {
		.qp_state = IB_QPS_RTS,
		.sq_psn = 0x100,
		.timeout = 14,
		.retry_cnt = 7,
		.rnr_retry = options->rnr_retry ?: 7,
		.max_rd_atomic = 8,
	};
	int mask = IB_QP_STATE | IB_QP_SQ_PSN;

	if (reliable(end)) {
		mask |= IB_QP_TIMEOUT;
		if (end->qp->qp_type != IB_QPT_XRC_TGT)
			mask |= IB_QP_RETRY_CNT | IB_QP_RNR_RETRY | IB_QP_MAX_QP_RD_ATOMIC;
	}
	OK(ib_modify_qp(end->qp, &attr, mask));
}

void to_state(struct end *end, enum ib_qp_state state)
{
	struct ib_qp_attr attr = { .qp_state = state };

	OK(ib_modify_qp(end->qp, &attr, IB_QP_STATE));
}

enum ib_qp_state state_of(struct end *end)
{
	struct ib_qp_attr attr = {};
	struct ib_qp_init_attr init = {};

	OK(ib_query_qp(end->qp, &attr, IB_QP_STATE, &init));
	return attr.qp_state;
}

void expect_state(struct end *end, enum ib_qp_state state)
{
	int i;

	for (i = 0; i < 200 && state_of(end) != state; i++)
		msleep(10);
	EQ(state_of(end), state);
}

struct pair connected(const struct options *options)
{
	struct pair pair = {};

	pair.b.pd = options->srq_pd;
	make_end(&pair.a, options, false);
	if (options->one_pd)
		pair.b.pd = pair.a.pd;
	make_end(&pair.b, options, true);
	to_init(&pair.a, options);
	to_init(&pair.b, options);
	to_rtr(&pair.a, &pair.b, options);
	to_rtr(&pair.b, &pair.a, options);
	to_rts(&pair.a, options);
	to_rts(&pair.b, options);
	return pair;
}

/* Memory. */

static void undo_buffer(void *what)
{
	struct buffer *buffer = what;

	if (buffer->addr)
		ib_dma_unmap_single(device, buffer->addr, buffer->length, DMA_BIDIRECTIONAL);
	free_pages_exact(buffer->data, buffer->length);
	kfree(buffer);
}

struct buffer *make_buffer(size_t length)
{
	struct buffer *buffer = kzalloc(sizeof(*buffer), GFP_KERNEL);

	if (!buffer)
		fail("no memory");
	buffer->length = length;
	buffer->data = alloc_pages_exact(length, GFP_KERNEL | __GFP_ZERO);
	if (!buffer->data) {
		kfree(buffer);
		fail("no memory for %zu bytes that follow each other", length);
	}
	defer(UNDO_LAST, undo_buffer, buffer);
	buffer->addr = ib_dma_map_single(device, buffer->data, length, DMA_BIDIRECTIONAL);
	if (ib_dma_mapping_error(device, buffer->addr)) {
		buffer->addr = 0;
		fail("cannot map a buffer");
	}
	return buffer;
}

static u8 byte_at(size_t position, unsigned int seed)
{
	return (position * 31 + (position >> 8) * 7 + (position >> 16) + seed * 101 + 1) & 0xff;
}

void fill(void *data, size_t length, unsigned int seed)
{
	u8 *bytes = data;
	size_t i;

	for (i = 0; i < length; i++)
		bytes[i] = byte_at(i, seed);
}

bool filled(const void *data, size_t length, unsigned int seed)
{
	const u8 *bytes = data;
	size_t i;

	for (i = 0; i < length; i++)
		if (bytes[i] != byte_at(i, seed))
			return false;
	return true;
}

bool all_zero(const void *data, size_t length)
{
	return !memchr_inv(data, 0, length);
}

static unsigned int order_of(const struct segment *segment)
{
	return get_order(segment->offset + segment->length);
}

static void undo_segments(void *what)
{
	struct segments *segments = what;
	unsigned int i;

	if (segments->nents)
		ib_dma_unmap_sg(device, segments->table.sgl, segments->table.orig_nents, DMA_BIDIRECTIONAL);
	sg_free_table(&segments->table);
	for (i = 0; segments->pages && i < segments->count; i++)
		if (segments->pages[i])
			free_pages((unsigned long)segments->pages[i], order_of(&segments->segment[i]));
	kvfree(segments->pages);
	kvfree(segments->segment);
	kfree(segments);
}

struct segments *make_segments(const struct segment *list, unsigned int count)
{
	struct segments *segments = kzalloc(sizeof(*segments), GFP_KERNEL);
	struct scatterlist *sg;
	unsigned int i;

	if (!segments)
		fail("no memory");
	defer(UNDO_LAST, undo_segments, segments);
	segments->segment = kvmemdup(list, count * sizeof(*list), GFP_KERNEL);
	segments->pages = kvcalloc(count, sizeof(*segments->pages), GFP_KERNEL);
	if (!segments->segment || !segments->pages || sg_alloc_table(&segments->table, count, GFP_KERNEL))
		fail("no memory");
	segments->count = count;
	for_each_sg(segments->table.sgl, sg, count, i) {
		segments->pages[i] = (u8 *)__get_free_pages(GFP_KERNEL | __GFP_ZERO | __GFP_COMP, order_of(&list[i]));
		if (!segments->pages[i])
			fail("no memory");
		sg_set_buf(sg, segments->pages[i] + list[i].offset, list[i].length);
		segments->length += list[i].length;
	}
	segments->nents = ib_dma_map_sg(device, segments->table.sgl, count, DMA_BIDIRECTIONAL);
	if (!segments->nents)
		fail("cannot map a list");
	return segments;
}

struct segments *make_pages(unsigned int count)
{
	struct segment *list = memory(count * sizeof(*list));
	unsigned int i;

	for (i = 0; i < count; i++)
		list[i].length = PAGE_SIZE;
	return make_segments(list, count);
}

u8 *byte_of(struct segments *segments, size_t position)
{
	unsigned int i;

	for (i = 0; i < segments->count; i++) {
		if (position < segments->segment[i].length)
			return segments->pages[i] + segments->segment[i].offset + position;
		position -= segments->segment[i].length;
	}
	fail("position beyond the segments");
}

void fill_segments(struct segments *segments, unsigned int seed)
{
	size_t position = 0;
	unsigned int i;
	u32 j;

	for (i = 0; i < segments->count; i++)
		for (j = 0; j < segments->segment[i].length; j++)
			segments->pages[i][segments->segment[i].offset + j] = byte_at(position++, seed);
}

bool filled_segments(struct segments *segments, unsigned int seed)
{
	size_t position = 0;
	unsigned int i;
	u32 j;

	for (i = 0; i < segments->count; i++)
		for (j = 0; j < segments->segment[i].length; j++)
			if (segments->pages[i][segments->segment[i].offset + j] != byte_at(position++, seed))
				return false;
	return true;
}

bool zero_segments(struct segments *segments)
{
	unsigned int i;

	for (i = 0; i < segments->count; i++)
		if (!all_zero(segments->pages[i], PAGE_SIZE << order_of(&segments->segment[i])))
			return false;
	return true;
}

/* Work requests. */

struct request *make_request(struct end *end, enum ib_wr_opcode opcode)
{
	struct request *request = memory(sizeof(*request));

	op_init(&request->op, end->send_cq);
	request->wr.wr_cqe = &request->op.cqe;
	request->wr.opcode = opcode;
	request->wr.send_flags = IB_SEND_SIGNALED;
	request->wr.sg_list = request->sges;
	return request;
}

void with_sge(struct request *request, u64 addr, u32 length, u32 lkey)
{
	struct ib_sge *sge = &request->sges[request->wr.num_sge++];

	CHECK(request->wr.num_sge <= MAX_SGES);
	sge->addr = addr;
	sge->length = length;
	sge->lkey = lkey;
}

void with_buffer(struct end *end, struct request *request, const struct buffer *buffer, size_t offset, u32 length)
{
	with_sge(request, buffer->addr + offset, length, end->pd->local_dma_lkey);
}

void to_remote(struct request *request, u64 addr, u32 rkey)
{
	if (request->wr.opcode == IB_WR_ATOMIC_CMP_AND_SWP || request->wr.opcode == IB_WR_ATOMIC_FETCH_AND_ADD ||
	    request->wr.opcode == IB_WR_MASKED_ATOMIC_CMP_AND_SWP ||
	    request->wr.opcode == IB_WR_MASKED_ATOMIC_FETCH_AND_ADD) {
		request->atomic.remote_addr = addr;
		request->atomic.rkey = rkey;
	} else {
		request->rdma.remote_addr = addr;
		request->rdma.rkey = rkey;
	}
}

int try_post(struct end *end, struct request *request)
{
	const struct ib_send_wr *bad;

	return ib_post_send(end->qp, &request->wr, &bad);
}

void post(struct end *end, struct request *request)
{
	OK(try_post(end, request));
}

void run(struct end *end, struct request *request, enum ib_wc_status status)
{
	post(end, request);
	expect(&request->op, status);
}

struct request *make_rdma(struct end *end, enum ib_wr_opcode opcode, const struct buffer *buffer, u32 length, u64 addr,
			  u32 rkey)
{
	struct request *request = make_request(end, opcode);

	with_buffer(end, request, buffer, 0, length);
	to_remote(request, addr, rkey);
	return request;
}

struct receive *make_receive(struct ib_cq *cq)
{
	struct receive *receive = memory(sizeof(*receive));

	op_init(&receive->op, cq);
	receive->wr.wr_cqe = &receive->op.cqe;
	receive->wr.sg_list = receive->sges;
	return receive;
}

void receive_sge(struct receive *receive, u64 addr, u32 length, u32 lkey)
{
	struct ib_sge *sge = &receive->sges[receive->wr.num_sge++];

	CHECK(receive->wr.num_sge <= MAX_SGES);
	sge->addr = addr;
	sge->length = length;
	sge->lkey = lkey;
}

void post_receive(struct end *end, struct receive *receive)
{
	const struct ib_recv_wr *bad;

	if (end->qp->srq)
		OK(ib_post_srq_recv(end->qp->srq, &receive->wr, &bad));
	else
		OK(ib_post_recv(end->qp, &receive->wr, &bad));
}

struct receive *receive_into(struct end *end, const struct buffer *buffer, u32 length)
{
	struct receive *receive = make_receive(end->recv_cq);

	if (length)
		receive_sge(receive, buffer->addr, length, end->pd->local_dma_lkey);
	post_receive(end, receive);
	return receive;
}

/* Fast registration. */

void map(struct ib_mr *mr, struct segments *segments)
{
	EQ(ib_map_mr_sg(mr, segments->table.sgl, segments->nents, NULL, PAGE_SIZE), segments->nents);
	EQ(mr->length, segments->length);
}

struct request *make_reg(struct end *end, struct ib_mr *mr, int access)
{
	struct request *request = make_request(end, IB_WR_REG_MR);

	ib_update_fast_reg_key(mr, ib_inc_rkey(mr->rkey) & 0xff);
	request->reg.mr = mr;
	request->reg.key = mr->rkey;
	request->reg.access = access;
	return request;
}

struct request *make_inv(struct end *end, u32 key)
{
	struct request *request = make_request(end, IB_WR_LOCAL_INV);

	request->wr.ex.invalidate_rkey = key;
	return request;
}

void registered(struct end *end, struct ib_mr *mr, struct segments *segments, int access)
{
	struct request *reg;

	map(mr, segments);
	reg = make_reg(end, mr, access);
	post(end, reg);
	expect_ok(&reg->op, IB_WC_REG_MR);
}

struct ib_mr *remote_region(struct pair *pair, struct segments *segments, int access)
{
	struct ib_mr *mr = make_mr(pair->b.pd, IB_MR_TYPE_MEM_REG, segments->count + 1);

	registered(&pair->b, mr, segments, access);
	return mr;
}
